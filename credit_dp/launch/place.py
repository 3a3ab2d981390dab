"""Where a rank is on the mesh, in words: what every message about one rank calls it."""


def name_of(rank: int, data: int, domain: int) -> str:
    """`rank 5 (pipeline 1, data 0, domain 1)` on a mesh of so many data and domain ranks."""
    stage, rest = divmod(rank, data * domain)
    return f"rank {rank} (pipeline {stage}, data {rest // domain}, domain {rest % domain})"
