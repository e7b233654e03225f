from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    scheme: str
def chosen(whole, backward, memory):
    return Choice("all_gather")
