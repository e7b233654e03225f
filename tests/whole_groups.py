"""Blocks of a backward that each sum over all query heads of a group, however few blocks that makes."""

from cupy_flash.plan import grouping


def never_split(monkeypatch):
    monkeypatch.setattr(grouping, "heads_per_block", lambda plan, problem: problem.forward.heads_per_kv)
