"""Kinds of plans that the search returns for traced models: the space that leaves one of each, and its fields."""

ONE = {
    "sequence_parallel": (False,),
    "zero": (False,),
    "fsdp": (False,),
    "recompute": False,
    "max_stages": 1,
    "micro_batches": (1,),
}
TWO = {**ONE, "max_stages": 2, "micro_batches": (4,), "degrees": (2,)}
PIPELINES = ("one_f_one_b", "gpipe", "zb_h1", "interleaved", "zb_v")
KINDS = {
    "tp": (ONE | {"degrees": (4,)}, {"tp": 4, "stages": 1, "micro_batches": 1}),
    "dp": (ONE | {"degrees": (1,)}, {"tp": 1, "stages": 1}),
    "tp x dp": (ONE | {"degrees": (2,)}, {"tp": 2, "stages": 1}),
    "micro-batches": (ONE | {"degrees": (2,), "micro_batches": (2,)}, {"tp": 2, "micro_batches": 2}),
    "zero": (ONE | {"degrees": (2,), "zero": (True,)}, {"zero": True, "fsdp": False}),
    "fsdp": (ONE | {"degrees": (2,), "zero": (False,), "fsdp": (True,)}, {"zero": False}),
    "bfloat16 sums": (ONE | {"degrees": (2,), "wire": ("bfloat16",)}, {"wire": "bfloat16"}),
    "experts": (ONE | {"degrees": (2,), "expert_parallel": (4,)}, {"tp": 2, "stages": 1, "experts": 4}),
    **{
        f"experts, {way}": (
            ONE | {"degrees": (1,), "expert_parallel": (2,), way: (True,), "zero": (way == "zero",)},
            {"tp": 1, "experts": 2, way: True},
        )
        for way in ("zero", "fsdp")
    },
    "sequence-parallel": (ONE | {"degrees": (2,), "sequence_parallel": (True,)}, {"tp": 2, "stages": 1}),
    **{name: (TWO | {"pipelines": (name,)}, {"tp": 2, "micro_batches": 4}) for name in PIPELINES},
}
"""Space, and the fields that the plan sets."""


def plans_of(ranked, kind):
    """The plans of this kind, best first."""
    if kind in PIPELINES:
        return [plan for plan in ranked if len(plan.stages) == 2]
    if kind == "sequence-parallel":
        return [plan for plan in ranked if all(each.sequence_parallel for s in plan.stages for each in s.segments)]
    return [plan for plan in ranked if not kind.endswith("fsdp") or plan.fsdp]
