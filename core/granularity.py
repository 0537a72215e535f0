"""How far one scale reaches: a type, not a combination of flags."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PerTensor:
    """One scale for the whole tensor: [out, in] -> scale [1]."""


@dataclass(frozen=True, slots=True)
class PerChannel:
    """One scale for each output channel: [out, in] -> scale [out, 1]."""


@dataclass(frozen=True, slots=True)
class PerGroup:
    """One scale for `group_size` consecutive input columns of an output channel.

    [out, in] -> scale [out, in / group_size].
    """

    group_size: int


@dataclass(frozen=True, slots=True)
class PerToken:
    """One scale for each row of activations, chosen at run time: [tokens, in] -> scale [tokens, 1]."""


Granularity = PerTensor | PerChannel | PerGroup | PerToken
