"""Tools that check a private method: record/replay, worst-case neighbours, audits."""
