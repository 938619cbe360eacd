"""Training loops drawn at random: the same bits with plans and without, and beside torch nearly its numbers."""

from fuzz_programs import FEATURES, drawn, fuzz


def test_programs_have_the_same_bits_with_plans_and_without():
    failures, counts = fuzz(range(200))
    assert failures == []
    assert counts["beside torch"] >= 15
    assert counts["refused at the start"] <= 10


def test_programs_are_their_seeds_and_use_every_feature():
    assert drawn(7) == drawn(7)
    assert {name for seed in range(1000) for name, *_ in drawn(seed)["features"]} == FEATURES.keys()
