"""What is right: cases, the oracle, and how far a result may be from it."""
