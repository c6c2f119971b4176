"""What the card of GKAVision says, from the results of its experiments."""

from card_text import text_of
from hf_memmix.training.documents.measurements import read
from hf_memmix.training.experiments.common.averages import mean_and_deviation
from hf_memmix.training.experiments.common.rates import chosen_rows


def test_what_the_card_of_gka_vision_says():
    pictures, digits = text_of("gka_vision"), read("gka_vision_digits")["rows"]
    for said, model in (("GKA", "gka"), ("Mamba-2", "mamba2"), ("attention", "attention"), ("a ViT", "vit")):
        mean, _ = mean_and_deviation(100 * row["accuracy"] for row in chosen_rows(digits, model=model))
        assert f"{said} {mean:.2f} %" in pictures
    clothes = {}
    for row in read("gka_vision_fashion")["rows"]:
        clothes.setdefault(row["model"], []).append(100 * row["accuracy"])
    failed = [value for value in clothes["attention"] if value < 50]
    clothes["attention"] = [value for value in clothes["attention"] if value > 50]
    for said, model in (("GKA", "gka"), ("Mamba-2", "mamba2"), ("attention", "attention"), ("a ViT", "vit")):
        assert f"{said} {mean_and_deviation(clothes[model])[0]:.2f} %" in pictures
    assert "with two of three seeds (the third fails, 26.7 %)" in pictures and f"{failed[0]:.1f}" == "26.7"
    assert [len(values) for values in (clothes["attention"], clothes["gka"], failed)] == [2, 3, 1]
    behind = [clothes_of - mean_and_deviation(clothes["attention"])[0] for clothes_of in (
        mean_and_deviation(clothes[name])[0] for name in ("mamba2", "gka")
    )]  # fmt: skip
    assert "2 to 4 points behind on the clothes (deviations of the others 1.6 and 1.9)" in pictures
    assert 2 < behind[0] < behind[1] < 4
    assert [f"{mean_and_deviation(clothes[name])[1]:.1f}" for name in ("gka", "mamba2")] == ["1.6", "1.9"]
    speed = {(r["model"], r["resolution"]): r for r in read("gka_vision_throughput")["rows"]}
    for said, key in (
        ("GKAVision-T 12.6", ("gka", 224)), ("with Mamba-2 13.6", ("mamba2", 224)),
        ("with attention 11.4", ("attention", 224)), ("a ViT 12.4", ("vit", 224)), ("GKAVision-T 4.29", ("gka", 384)),
        ("GKAVision-T 4.29, 2.08", ("gka", 512)), ("GKAVision-T 4.29, 2.08, 1.07", ("gka", 768)),
        ("1.07 and 0.65", ("gka", 1024)), ("a ViT 4.06", ("vit", 384)), ("a ViT 4.06, 2.15", ("vit", 512)),
        ("a ViT 4.06, 2.15, 0.83", ("vit", 768)), ("0.83 and 0.30", ("vit", 1024)),
        ("at 1024 pixels with Mamba-2 0.72", ("mamba2", 1024)), ("and with attention 0.57", ("attention", 1024)),
    ):  # fmt: skip
        digits_after = len(said.rpartition(".")[2].split()[0])
        wanted = f"{speed[key]['inference_images_per_second'] / 1000:.{digits_after}f}"
        assert wanted in said and said in pictures
