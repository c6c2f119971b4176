"""Where layers that take over an attention start, beside the formulas that the module of each start states."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from hf_memmix.assets import asset_path
from hf_memmix.conversion import convert_model, load_model, starts
from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.from_attention import STARTS
from hf_memmix.training.data import tokenize_files
from hf_memmix.training.student_teacher import AlignStudentTeacher
from hf_memmix_kernels import naive_gated_delta, naive_ska
from tiny_teachers import tiny_teacher

LENGTH = 20


def taken_over(family, mixer, **options):
    """Attention and mixer of one layer in float64, an input [1, LENGTH, 32] and its rotary embeddings."""
    teacher = tiny_teacher(family).double()
    student = convert_model(teacher, mixer, keep=[1], **options)
    x = torch.randn(1, LENGTH, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rotary = teacher.model.rotary_emb(x, torch.arange(LENGTH)[None])
    return attention_module(teacher, 0), attention_module(student, 0), x, rotary


def projected(attention, x):
    """q, k, v [1, T, H, D] of a llama-like attention, before norms and rotation; a key head for each query head."""
    q, k, v = (
        f(x).unflatten(-1, (-1, attention.head_dim)) for f in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    return q, *(t.repeat_interleave(attention.num_key_value_groups, 2) for t in (k, v))


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos[:, :, None] + torch.cat([-second, first], -1) * sin[:, :, None]


def decays(low, high, heads):
    """What is left after a token in each head, half-lives log-spaced from `low` to `high` tokens."""
    return 0.5 ** (1 / torch.logspace(math.log10(low), math.log10(high), heads, dtype=torch.float64))


@torch.no_grad()
@pytest.mark.parametrize(("family", "sketch_dim"), [("llama", None), ("qwen2", None), ("qwen3", None), ("llama", 8)])
def test_gka_start(family, sketch_dim):
    """out = o(U (q + N / (N + 1) (x - q))) / 2 with x = (H + 0.05 |H|)^-1 q, a write strength of 1/2, half-lives 1 to
    16, and N = 1 / (1 - decay) the number of tokens that are remembered.

    A sketch of the head size starts as a rotation, which changes nothing.
    """
    attention, mixer, x, rotary = taken_over(family, "gka", solver_phases=[100], sketch_dim=sketch_dim)
    q, k, v = projected(attention, x)
    if family == "qwen3":
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k = (F.normalize(rotated(t, *rotary), dim=-1) for t in (q, k))
    kept = decays(1, 16, 4)[:, None, None]
    alpha = 1 / (2 - kept[:, 0])  # N / (N + 1)
    H = U = torch.zeros(4, 8, 8, dtype=torch.float64)
    outputs = []
    for t in range(LENGTH):
        H = kept * H + 0.25 * k[0, t, :, :, None] * k[0, t, :, None, :]
        U = kept * U + 0.25 * v[0, t, :, :, None] * k[0, t, :, None, :]
        ridge = 0.05 * torch.linalg.matrix_norm(H)[:, None, None] * torch.eye(8)
        solution = torch.linalg.solve(H + ridge, q[0, t])
        outputs.append((U @ (q[0, t] + alpha * (solution - q[0, t]))[..., None]).flatten())
    expected = attention.o_proj(torch.stack(outputs)[None]) / 2
    torch.testing.assert_close(mixer(x, position_embeddings=rotary)[0], expected, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_a_window_beside_gka_starts_as_the_attention():
    """The window is the attention up to its size; the memory adds a little, with half-lives of 64 to 2048 tokens. The
    query's share in a head that remembers N tokens is 1 / (N + 1), since U q grows with N.
    """
    attention, mixer, x, rotary = taken_over("llama", "gka", local_window=6)
    memory, window = mixer.memory, mixer.window
    assert (mixer.m == 0.05).all()
    tokens, kept = memory.project(x, rotary), decays(64, 2048, 4)
    torch.testing.assert_close(tokens["log_decay"].exp(), kept.expand(1, LENGTH, 4), rtol=1e-5, atol=0)
    remembered = 1 / (1 - kept)
    torch.testing.assert_close(
        tokens["alpha"], (remembered / (remembered + 1)).expand(1, LENGTH, 4), rtol=1e-5, atol=0
    )
    x, rotary = x[:, :6], tuple(t[:, :6] for t in rotary)
    mask = torch.full((6, 6), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    expected = attention(x, position_embeddings=rotary, attention_mask=mask)[0]
    y, _ = window.scan(window.project(x, rotary), None)
    torch.testing.assert_close(window.readout(y, x), expected)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2", "olmo2"])  # with biases; with a norm of k over all heads
@pytest.mark.parametrize("mixer", ["gka", "lattice", "window"])
def test_unshared_keys_start_as_the_shared_ones(family, mixer):
    """Each query head has keys and values of its own, and computes what it did with those of its group."""
    attention, shared, x, rotary = taken_over(family, mixer)
    _, own, _, _ = taken_over(family, mixer, unshare_kv_heads=True)
    assert own.kv_heads == own.heads == 2 * shared.kv_heads
    torch.testing.assert_close(own(x, position_embeddings=rotary)[0], shared(x, position_embeddings=rotary)[0])
    rows = convert_model(tiny_teacher(family), mixer, unshare_kv_heads=True).conversion_report.kinds()
    changed = {row["source"].split(".")[-2] for row in rows if row["fate"] == "transformed"}
    assert {"k_proj", "v_proj"} <= changed and "q_proj" not in changed


@torch.no_grad()
@pytest.mark.parametrize("mixer", ["gka", "window"])
def test_norms_of_q_and_k_that_the_attention_lacks(mixer):
    """GKA normalises q and k anyway, so nothing changes. The scores of a window keep their size, for white inputs."""
    _, plain, x, rotary = taken_over("llama", mixer)
    _, normed, _, _ = taken_over("llama", mixer, qk_norm="head")
    if mixer == "gka":
        outputs = [m(x, position_embeddings=rotary)[0] for m in (plain, normed)]
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
        return
    x = torch.randn(1, 4000, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    still = (torch.ones(1, 4000, 8, dtype=torch.float64), torch.zeros(1, 4000, 8, dtype=torch.float64))
    for name in "qk":
        sizes = [m.project(x, still)[name].square().mean().item() for m in (plain, normed)]
        assert sizes[1] == pytest.approx(sizes[0], rel=0.1)


@torch.no_grad()
def test_the_gate_of_a_window_starts_at_one():
    """Bit for bit: the output is that of a window without a gate, and the gate has a gradient."""
    _, plain, x, rotary = taken_over("llama", "window", window=6)
    _, gated, _, _ = taken_over("llama", "window", window=6, output_gate=True)
    assert torch.equal(gated(x, position_embeddings=rotary)[0], plain(x, position_embeddings=rotary)[0])
    with torch.enable_grad():
        gated(x, position_embeddings=rotary)[0].square().sum().backward()
    assert gated.g_proj.weight.grad.abs().max() > 0


@torch.no_grad()
def test_gkas_sketch_starts_orthonormal():
    """In directions that differ between heads and layers; all tensors of the attention are taken over beside it."""
    student = convert_model(tiny_teacher("llama"), "gka", sketch_dim=3)
    layers = [attention_module(student, layer) for layer in (0, 1)]
    for mixer in layers:
        assert mixer.sketch.shape == (2, 8, 3)
        torch.testing.assert_close(mixer.sketch.mT @ mixer.sketch, torch.eye(3).expand(2, 3, 3))
        assert (mixer.sketch[0] - mixer.sketch[1]).abs().max() > 0.1
    assert (layers[0].sketch - layers[1].sketch).abs().max() > 0.1
    assert student.conversion_report.counts()["dropped"] == 0


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("mixer", "gate", "options"), [("gated_delta", 0.75, {}), ("kda", 0.75, {}), ("kda", 0.5, {"gate_bias": False})]
)
def test_the_delta_rule_starts(mixer, gate, options, family):
    """out = gate o(S^T q), q and k of norm 1, a write strength of 1/2, half-lives 1 to 16."""
    attention, mixer, x, rotary = taken_over(family, mixer, **options)
    q, k, v = projected(attention, x)
    if family == "qwen3":
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k = (F.normalize(rotated(t, *rotary), dim=-1) for t in (q, k))
    log_decay = decays(1, 16, 4).log().expand(1, LENGTH, -1)
    y, _ = naive_gated_delta(q, k, v, log_decay, torch.full_like(log_decay, 0.5), scale=1.0)
    expected = gate * attention.o_proj(y.flatten(2))
    torch.testing.assert_close(mixer(x, position_embeddings=rotary)[0], expected, rtol=1e-3, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gated_delta", "kda"])
def test_the_delta_rule_beside_a_window_forgets_slowly(kind):
    """Half-lives of 64 to 2048 tokens."""
    _, layer, x, rotary = taken_over("llama", kind, local_window=6)
    tokens = layer.memory.project(x, rotary)
    kept = tokens["log_decay"].exp().view(1, LENGTH, 4, -1)
    torch.testing.assert_close(kept, decays(64, 2048, 4)[:, None].expand_as(kept), rtol=1e-6, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_ska_start(family):
    """out = o(eta SKA(q, k, v)), eta 1/2 and the ridge 1; at the attention's own rank q . k are its scores."""
    attention, mixer, x, _ = taken_over(family, "ska", rank=8, chunk_size=4)
    q, k, v = (f(x).unflatten(-1, (-1, 8)) for f in (mixer.q_proj, mixer.k_proj, attention.v_proj))
    expected, _ = naive_ska(q, k, v, None, None, None, chunk_size=4, eps=1.0)
    assert expected[:, 4:].abs().min() > 0
    torch.testing.assert_close(mixer(x)[0], attention.o_proj(expected.flatten(2) / 2), rtol=1e-9, atol=1e-12)
    own, keys, _ = projected(attention, x)
    scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(attention.num_key_value_groups, 2))
    torch.testing.assert_close(scores, torch.einsum("bthd,bshd->bhts", own, keys), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_mamba2_start(family):
    """out = o(s rms-normed sum of decay^age (q . k) v per head), q, k, v behind a SiLU, half-lives 1 to 64.

    s is 1/40 of the size of each channel of v, for an input of size 1. A norm of q or k leaves its scale. No skip
    of v past the memory, no gate, dt = 1.
    """
    attention, mixer, x, rotary = taken_over(family, "mamba2")
    q, k, v = projected(attention, x)
    if family == "qwen3":
        q, k = q * attention.q_norm.weight, k * attention.k_norm.weight
    q, k, v = F.silu(q), F.silu(k), F.silu(v)
    ages = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    weights = torch.where(ages >= 0, decays(1, 64, 4)[:, None, None] ** ages.clamp_min(0), 0)
    y = torch.einsum("bthd,bshd,hts,bshe->bthe", q, k, weights, v)
    y = y * (y.square().mean(-1, keepdim=True) + mixer.options.norm_eps).rsqrt()
    v_proj = attention.v_proj
    sizes = (v_proj.weight.square().sum(1) + (0 if v_proj.bias is None else v_proj.bias.square())).sqrt()
    sizes = sizes.view(2, 1, -1).expand(2, 2, -1).flatten()  # four query heads share two heads of v
    expected = attention.o_proj(sizes * y.flatten(2) / 40)
    torch.testing.assert_close(mixer(x, position_embeddings=rotary)[0], expected, rtol=1e-3, atol=1e-5)


DECAYING = ["gka", "gated_delta", "kda", "mamba2", "coffee"]


@pytest.fixture(scope="module")
def bundled():
    """The bundled transformer, and tokens that it has not seen."""
    tokens = tokenize_files(asset_path("dev.txt"), AutoTokenizer.from_pretrained(asset_path("tiny_teacher")))
    return load_model(asset_path("tiny_teacher")).float(), torch.as_tensor(tokens[None, :512]).long()


@torch.no_grad()
@pytest.mark.product_rows(r".*-half_lives[123]\]")
@pytest.mark.parametrize("half_lives", (None, [64, 64], [64, 2048], [2048, 2048]))
@pytest.mark.parametrize("mixer", DECAYING)
def test_a_start_is_nearer_to_the_attention_than_nothing(mixer, half_lives, bundled):
    """However long the memory lasts: the mean of |mixer - attention|^2 / |attention|^2 over the layers of the bundled
    transformer is below 1.
    """
    teacher, ids = bundled
    student = convert_model(teacher, mixer, half_lives=half_lives)
    assert AlignStudentTeacher(student, teacher)(ids)["loss"] < 1


@torch.no_grad()
@pytest.mark.parametrize("mixer", DECAYING)
@pytest.mark.parametrize("start", ["attention", "scratch"])
def test_half_lives_are_those_of_the_option(start, mixer):
    """Log-spaced over the heads, or over the states of COFFEE, for a token at which no gate leans to one side."""
    student = convert_model(tiny_teacher("llama"), mixer, half_lives=[4, 32])
    layer = attention_module(student if start == "attention" else type(student)(student.config), 0)
    if mixer == "coffee":
        kept = 1 + layer.lam()[0] / 2
    else:
        x = torch.zeros(1, 1, 32)
        angles = (torch.ones(1, 1, 8), torch.zeros(1, 1, 8))
        kept = layer.project(x, angles)["log_decay"].exp().flatten()
    expected = decays(4, 32, layer.options.states if mixer == "coffee" else layer.heads).float()
    torch.testing.assert_close(kept, expected.repeat_interleave(len(kept) // len(expected)))


# ---- the table


def test_a_second_start_of_a_mixer_is_refused():
    with pytest.raises(ValueError, match="'gka' has a start from attention already"):
        starts("gka")(lambda mixer, attention: [])


def test_mixers_without_a_start_are_refused_by_name(monkeypatch):
    monkeypatch.delitem(STARTS, "ska")
    with pytest.raises(ValueError, match=r"'ska' cannot start from attention.* can: .*gka.*mamba2"):
        convert_model(tiny_teacher(), "ska")
