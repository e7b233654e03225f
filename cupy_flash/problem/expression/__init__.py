"""Scores and masks as the user writes them: read, typed, evaluated, differentiated, and written as C++."""
