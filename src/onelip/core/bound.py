"""The result of every rule: a proved constant, or the reason why there is none."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bound:
    """A proved Lipschitz constant (L2, one sample, eval mode, real arithmetic).

    Attributes:
        constant: the number; None if no bound is known.
        why: the argument for it, or the reason why no bound is known, in a few words.
    """

    constant: float | None
    why: str
