"""Ids of traces and spans: pure functions of what a context carries, so any process computes the same ones.

``mix`` is the 64-bit finalizer of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014, with the constants of Stafford's variant 13). It is a bijection of 64 bits, so
different steps never share a span id; a key of its own per use keeps the uses apart::

    trace id of a root step      mix(root ^ A) << 64 | mix(root ^ B)
    span id of a step            mix(step id ^ C)
    span id of a phase record    mix((mix(ring id ^ E) + sequence) ^ D)
    trace id of a lone phase     as of a root step, from mix(ring id ^ E) + sequence, with F and G
"""

from __future__ import annotations

from typing import Final

from otel_dflash.records import WORD_MASK

# Fixed for ever: other processes, hosts and versions compute the same ids. The first hex digits of pi after
# the point.
_KEY_A: Final = 0x243F6A8885A308D3
_KEY_B: Final = 0x13198A2E03707344
_KEY_C: Final = 0xA4093822299F31D0
_KEY_D: Final = 0x082EFA98EC4E6C89
_KEY_E: Final = 0x452821E638D01377
_KEY_F: Final = 0xBE5466CF34E90C6C
_KEY_G: Final = 0xC0AC29B7C97C50DD


def mix(word: int) -> int:
    """Return the SplitMix64 finalizer of a 64-bit word: a bijection."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD_MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD_MASK
    return word ^ (word >> 31)


def trace_id(root: int) -> int:
    """Return the 128-bit trace id of a root step."""
    return (mix(root ^ _KEY_A) << 64 | mix(root ^ _KEY_B)) or 1


def step_span_id(step: int) -> int:
    """Return the 64-bit span id of a step."""
    return mix(step ^ _KEY_C) or 1


def ring_key(ring: int) -> int:
    """Return what the next two functions take for a ring: computed once, not per span."""
    return mix(ring ^ _KEY_E)


def phase_span_id(key: int, sequence: int) -> int:
    """Return the 64-bit span id of the phase record `sequence` of the ring with that `ring_key`."""
    return mix(((key + sequence) & WORD_MASK) ^ _KEY_D) or 1


def lone_trace_id(key: int, sequence: int) -> int:
    """Return the 128-bit trace id of a phase record that belongs to no step."""
    word = (key + sequence) & WORD_MASK
    return (mix(word ^ _KEY_F) << 64 | mix(word ^ _KEY_G)) or 1
