"""docs/layers.md repeats the figures of docs/results/sweep.json, which covers the present catalogue."""

from __future__ import annotations

from collections import Counter

from tests.docs.pages import file_of, unsaid
from tools.network_sweep import METHODS
from tools.sweep_catalogue import catalogue

SWEEP = file_of("sweep.json")


def test_the_result_is_that_of_the_whole_catalogue_and_has_no_fault():
    assert SWEEP["by_library"] == Counter(name.split("/")[0] for name in catalogue())
    assert SWEEP["networks"] == sum(SWEEP["by_library"].values()) == sum(SWEEP["commits"].values())
    assert SWEEP["pairs"] == len(METHODS) * SWEEP["networks"] == sum(SWEEP["outcomes"].values())
    assert set(SWEEP["outcomes"]) == {"ok", "refused"}
    assert SWEEP["refused_by_method"] == {"nested": SWEEP["outcomes"]["refused"]}
    assert SWEEP["faults"] == SWEEP["unlisted"] == []


def test_the_sweep_keeps_what_it_promises():
    assert SWEEP["median_share_of_weights_rank1"] >= 0.98
    assert SWEEP["timm_networks_whose_norms_are_patched"] >= 0.9 * SWEEP["timm_networks_with_norms"]
    assert SWEEP["cpu_minutes"] <= 90
    assert {"torch", "timm", "torchvision", "transformers"} <= set(SWEEP["versions"])


def test_the_page_on_layers():
    libraries, outcomes = SWEEP["by_library"], SWEEP["outcomes"]
    said = [
        f"`make sweep` converts {SWEEP['networks']} networks with {len(METHODS)} methods: {libraries['timm']} of timm, "
        f"{libraries['torchvision']} of torchvision, {libraries['transformers']} of transformers.",
        f"In {outcomes['ok']:,} of {SWEEP['pairs']:,} pairs all checks hold",
        f"`NestedDropout` refuses the other {outcomes['refused']}",
        f"`Rank1` covers {100 * SWEEP['median_share_of_weights_rank1']:.1f} % of the weights in the median network.",
        f"`ModelPatch` converts at least 90 % of the norms in {SWEEP['timm_networks_whose_norms_are_patched']} of "
        f"{SWEEP['timm_networks_with_norms']} networks of timm with norms.",
    ]
    assert unsaid("docs/layers.md", said) == []
    assert len(SWEEP["compared_in_float64"]) == 1
    assert unsaid("docs/layers.md", ["one pair was compared in float64"]) == []
