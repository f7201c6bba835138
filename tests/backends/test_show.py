"""Kernels as text: golden pictures of what a few regions become."""

from __future__ import annotations

import re

import expecttest
import torch

from perfopt.backends.lower import lower_region
from perfopt.backends.show import describe
from tests.backends.kernels import traced


def _numbered(text: str) -> str:
    """The text with its symbols numbered in order: torch names them as it likes."""
    names = dict.fromkeys(re.findall(r"\bs\d+\b", text))
    for number, name in enumerate(names):
        text = re.sub(rf"\b{name}\b", f"n{number}", text)
    return text


class TestDescribe(expecttest.TestCase):
    def test_softmax(self) -> None:
        gm = traced(lambda x: torch.softmax(x, -1), torch.randn(3, 40, 77))
        (kernel,) = lower_region("softmax", gm).kernels
        self.assertExpectedInline(
            describe(kernel),
            """\
kernel softmax(in0: f32, out0: f32) over [a1=120 | a2=77]
  %0 = load in0[77*a1 + a2] : f32  [a1 a2]
  %1 = reduce %0, max : f32  [a1]
  %2 = sub %0, %1 : f32  [a1 a2]
  %3 = exp %2 : f32  [a1 a2]
  %4 = reduce %3, sum : f32  [a1]
  %5 = div %3, %4 : f32  [a1 a2]
  store out0[77*a1 + a2], %5
""",
        )

    def test_symbolic_bias(self) -> None:
        gm = traced(lambda x, b: (x + b).relu(), torch.randn(40, 77), torch.randn(77), dynamic=True)
        (kernel,) = lower_region("bias", gm).kernels
        self.assertExpectedInline(
            _numbered(describe(kernel)),
            """\
kernel bias(in0: f32, in1: f32, out0: f32) over [a0=n0 a1=n1]
  %0 = load in0[n1*a0 + a1] : f32  [a0 a1]
  %1 = load in1[a1] : f32  [a1]
  %2 = add %0, %1 : f32  [a0 a1]
  %3 = const 0 : f32
  %4 = lt %2, %3 : i1  [a0 a1]
  %5 = select %4, %3, %2 : f32  [a0 a1]
  store out0[n1*a0 + a1], %5
""",
        )

    def test_row_and_column_sums(self) -> None:
        gm = traced(lambda x: (x.sum(-1), x.sum(0)), torch.randn(150, 40))
        text = "".join(map(describe, lower_region("sums", gm).kernels))
        self.assertExpectedInline(
            text,
            """\
kernel sums_rows(in0: f32, out0: f32, part0: f32) over [a0=150 | a1=40]
  %0 = load in0[40*a0 + a1] : f32  [a0 a1]
  %1 = reduce %0, sum : f32  [a0]
  store out0[a0], %1
  accumulate part0[a1 + 40*block], %0
kernel sums_columns(out1: f32, part0: f32) over [a1=40 | block=3]
  %0 = load part0[a1 + 40*block] : f32  [a1 block]
  %1 = reduce %0, sum : f32  [a1]
  store out1[a1], %1
""",
        )
