"""Checkpoints of the official GKA release against its layer written out from its description, in float64."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from cli_runner import memmix, result_of
from hf_memmix.conversion import load_model
from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.hmf import import_hmf
from tiny_teachers import tiny_tokenizer

HIDDEN, HEADS, KV_HEADS, D, MLP, VOCAB, TAPS = 32, 4, 2, 16, 48, 24, 4
IDS = torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))


def release_config(kinds=("*", "GKA", "GKA"), model_type="hybrid_qwen3", **gka):
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": D}
    sizes |= {"intermediate_size": MLP, "vocab_size": VOCAB, "num_hidden_layers": len(kinds), "rms_norm_eps": 1e-6}
    own = {"hidden_size": HIDDEN, "head_dim": D, "num_q_heads": HEADS, "num_k_heads": KV_HEADS}
    own |= {"num_v_heads": KV_HEADS, "use_alpha_connection": True, "use_v_conv": True, "use_forgetting_gate": True}
    own |= {"use_forgetting_gate_kk": True, "gla_rescale": True, "solver_type": "chebyshev", "bp_lambda": True}
    own |= {"num_iter": 30, "ridge_strength": 0.02, "use_gate": True, "conv_size": TAPS, "norm_eps": 1e-6}
    own |= {"use_beta_gate": True, "chunk_size": 64, "kv_proj_rank": None, "kv_learnable_residual": False} | gka
    return sizes | {
        "model_type": model_type,
        "architectures": ["HybridQwen3ForCausalLM"],
        "layer_types": list(kinds),
        "hybrid_override_pattern": "-".join(kinds),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "gka_config": own,
        "gdn_config": {"head_dim": D},
    }


def release_tensors(config):
    """Random tensors under the release's names and shapes."""
    q, kv = HEADS * D, KV_HEADS * D
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    gka = config["gka_config"]
    for i, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{norm}.weight"] = (HIDDEN,)
        for name, shape in (("gate", (MLP, HIDDEN)), ("up", (MLP, HIDDEN)), ("down", (HIDDEN, MLP))):
            shapes[f"{layer}mlp.{name}_proj.weight"] = shape
        mixer = layer + ("gka." if kind == "GKA" else "self_attn.")
        for name, shape in (("q", (q, HIDDEN)), ("k", (kv, HIDDEN)), ("v", (kv, HIDDEN)), ("o", (HIDDEN, q))):
            shapes[f"{mixer}{name}_proj.weight"] = shape
        if kind != "GKA":
            if config["model_type"] == "hybrid_qwen3":
                shapes |= {f"{mixer}q_norm.weight": (D,), f"{mixer}k_norm.weight": (D,)}
            continue
        shapes |= {f"{mixer}A_log": (HEADS,), f"{mixer}dt_bias": (HEADS,), f"{mixer}a_proj.weight": (HEADS, HIDDEN)}
        for used, name in ((gka["use_beta_gate"], "b_proj"), (gka["use_alpha_connection"], "alpha_proj")):
            if used:
                shapes |= {f"{mixer}{name}.weight": (HEADS, HIDDEN), f"{mixer}{name}.bias": (HEADS,)}
        for name, size in (("q", q), ("k", kv), ("v", kv))[: 3 if gka["use_v_conv"] else 2]:
            shapes[f"{mixer}{name}_conv1d.weight"] = (size, 1, TAPS)
        if gka["use_gate"]:
            shapes[f"{mixer}g_proj.weight"] = (q, HIDDEN)
        shapes[f"{mixer}o_norm.weight"] = (D,)
    draw = torch.Generator().manual_seed(1)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=draw)
        tensors[name] = 1 + 0.2 * noise if "norm" in name else noise * (1 if len(shape) == 1 else shape[-1] ** -0.5)
    return tensors


def write_release(folder, config, tensors=None):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(release_tensors(config) if tensors is None else tensors, folder / "model.safetensors")
    tiny_tokenizer().save_pretrained(folder)
    return folder


# ---- the model of the release, from its description


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def convolve(x, weight):
    """Depthwise causal convolution and SiLU; x [B, T, C]."""
    padded = F.pad(x, (0, 0, TAPS - 1, 0))
    return F.silu(sum(padded[:, i : i + x.shape[1]] * weight[:, 0, i] for i in range(TAPS)))


def heads_of(x):
    x = x.unflatten(-1, (-1, D))
    return x.repeat_interleave(HEADS // x.shape[2], 2)


def chebyshev(H, q, ridge, iterations):
    norm = H.square().sum((-1, -2)).sqrt()[..., None]
    lam = ridge * norm
    step, rho = 2 / (2 * lam + norm), norm / (2 * lam + norm)
    x, past, omega = step * q, torch.zeros_like(q), 2.0
    for _ in range(iterations):
        omega = 1 / (1 - rho**2 / 4 * omega)
        residual = (H @ x[..., None])[..., 0] + lam * x - q
        x, past = omega * x - step * omega * residual - (omega - 1) * past, x
    return x


def gka_layer(x, p, options):
    """One GKA layer of the release; p: its tensors by name."""
    names = "qkv"
    streams = {n: x @ p[f"{n}_proj.weight"].T for n in names}
    convolved = names if options["use_v_conv"] else "qk"
    streams |= {n: convolve(streams[n], p[f"{n}_conv1d.weight"]) for n in convolved}
    q, k, v = (heads_of(streams[n]) for n in names)
    q, k = (y / (y.norm(dim=-1, keepdim=True) + 1e-6) for y in (q, k))
    if options["use_beta_gate"]:
        beta = (x @ p["b_proj.weight"].T + p["b_proj.bias"]).sigmoid()[..., None] + 1e-6
        k, v = beta * k, beta * v
    alpha = torch.ones_like(q[..., :1])
    if options["use_alpha_connection"]:
        alpha = (x @ p["alpha_proj.weight"].T + p["alpha_proj.bias"]).sigmoid()[..., None]
    g = torch.zeros_like(q[..., 0])
    if options["use_forgetting_gate"]:
        g = -p["A_log"].exp() * F.softplus(x @ p["a_proj.weight"].T + p["dt_bias"])
    H = U = x.new_zeros(x.shape[0], HEADS, D, D)
    outputs = []
    for t in range(x.shape[1]):
        decay = g[:, t].exp()[..., None, None]
        H = decay * H + k[:, t, :, :, None] * k[:, t, :, None, :]
        U = decay * U + v[:, t, :, :, None] * k[:, t, :, None, :]
        solved = chebyshev(H, q[:, t], options["ridge_strength"], options["num_iter"])
        read = q[:, t] + alpha[:, t] * (solved - q[:, t])
        outputs.append((U @ read[..., None])[..., 0])
    y = torch.stack(outputs, 1) * (D**-0.5 if options["gla_rescale"] else 1)
    y = rms(y, p["o_norm.weight"], options["norm_eps"]).flatten(2)
    if options["use_gate"]:
        y = y * F.silu(x @ p["g_proj.weight"].T)
    return y @ p["o_proj.weight"].T


def attention_layer(x, p):
    q, k, v = (x @ p[f"{n}_proj.weight"].T for n in "qkv")
    q, k, v = (y.unflatten(-1, (-1, D)) for y in (q, k, v))
    if "q_norm.weight" in p:
        q, k = rms(q, p["q_norm.weight"], 1e-6), rms(k, p["k_norm.weight"], 1e-6)
    angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(0, D, 2).double() / D)
    cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
    q, k = (y * cos + torch.cat([-y[..., D // 2 :], y[..., : D // 2]], -1) * sin for y in (q, k))
    q, k, v = (heads_of(y.flatten(2)).transpose(1, 2) for y in (q, k, v))
    scores = q @ k.mT / math.sqrt(D)
    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    y = scores.masked_fill(future, -math.inf).softmax(-1) @ v
    return y.transpose(1, 2).flatten(2) @ p["o_proj.weight"].T


def release_logits(config, tensors, ids):
    w = {name: tensor.double() for name, tensor in tensors.items()}
    x = w["model.embed_tokens.weight"][ids]
    for i, kind in enumerate(config["layer_types"]):
        below = {n.removeprefix(f"model.layers.{i}."): t for n, t in w.items() if n.startswith(f"model.layers.{i}.")}
        prefix = "gka." if kind == "GKA" else "self_attn."
        own = {n.removeprefix(prefix): t for n, t in below.items() if n.startswith(prefix)}
        h = rms(x, below["input_layernorm.weight"], 1e-6)
        x = x + (gka_layer(h, own, config["gka_config"]) if kind == "GKA" else attention_layer(h, own))
        h = rms(x, below["post_attention_layernorm.weight"], 1e-6)
        gate, up = (h @ below[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ below["mlp.down_proj.weight"].T
    return rms(x, w["model.norm.weight"], 1e-6) @ w["lm_head.weight"].T


VARIANTS = {
    "as released": {},
    "no alpha, no v convolution": {"use_alpha_connection": False, "use_v_conv": False},
    "no gates": {
        "use_gate": False,
        "use_beta_gate": False,
        "use_forgetting_gate": False,
        "use_forgetting_gate_kk": False,
    },
    "unscaled, ten iterations": {"gla_rescale": False, "num_iter": 10, "ridge_strength": 0.1, "norm_eps": 1e-3},
}


@pytest.mark.parametrize("model_type", ["hybrid_qwen3", "hybrid_llama"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_are_those_of_the_release(tmp_path, variant, model_type):
    """Each GKA layer in float64, and the model, whose norms and angles transformers computes in fp32."""
    config = release_config(model_type=model_type, **VARIANTS[variant])
    tensors = release_tensors(config)
    model = import_hmf(write_release(tmp_path / "hmf", config, tensors))
    assert model.dtype == torch.float32
    with torch.no_grad():
        logits = model.double()(IDS).logits
    torch.testing.assert_close(logits, release_logits(config, tensors, IDS), rtol=1e-4, atol=1e-4)
    x = torch.randn(2, 11, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    own = {n.removeprefix("model.layers.2.gka."): t.double() for n, t in tensors.items()}
    with torch.no_grad():
        output = attention_module(model, 2)(x)[0]
    torch.testing.assert_close(output, gka_layer(x, own, config["gka_config"]), rtol=1e-9, atol=1e-10)


def test_command_writes_a_plain_model_with_its_tokenizer(tmp_path):
    source = write_release(tmp_path / "hmf", release_config())
    result = result_of(memmix("import-hmf", source, tmp_path / "ours", "--json"))
    assert result["layers"] == ["attention", "gka", "gka"] and result["backbone"] == "qwen3"
    assert result["copied"] == len(load_file(source / "model.safetensors")) and result["dropped"] == []
    loaded = load_model(tmp_path / "ours")
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, import_hmf(source)(IDS).logits, rtol=0, atol=0)
    assert json.loads((tmp_path / "ours" / "conversion.json").read_text())["copied"] == result["copied"]
    run = memmix("generate", "--model", tmp_path / "ours", "--prompt", "the cat", "--max-new-tokens", "3")
    assert run.exit_code == 0, run.output
    again = memmix("import-hmf", source, tmp_path / "ours")
    assert again.exit_code == 1 and "exists and is not empty" in again.output


def test_bf16_shards_tied_embeddings_and_unread_decays(tmp_path):
    """What the release also writes: several files, lm_head beside a tied embedding, a gate that is switched off."""
    config = release_config(use_forgetting_gate=False) | {"tie_word_embeddings": True}
    tensors = {name: tensor.bfloat16() for name, tensor in release_tensors(config).items()}
    folder = write_release(tmp_path / "hmf", config, tensors)
    (folder / "model.safetensors").unlink()
    shards = {f"model-{i}.safetensors": dict(list(tensors.items())[i::2]) for i in range(2)}
    for file, part in shards.items():
        save_file(part, folder / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match="lm_head.weight differs from the embeddings"):
        import_hmf(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    for i, file in enumerate(shards):
        save_file(dict(list(tensors.items())[i::2]), folder / file)
    model = import_hmf(folder)
    assert model.dtype == torch.bfloat16 and model.lm_head.weight is model.model.embed_tokens.weight
    unread = {f"model.layers.{i}.gka.{name}" for i in (1, 2) for name in ("A_log", "dt_bias", "a_proj.weight")}
    assert {row["source"] for row in model.conversion_report.dropped} == unread | {"lm_head.weight"}
    assert model(IDS).logits.isfinite().all()
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks the weight files model-1.safetensors"):
        import_hmf(folder)


def test_decays_are_kept_in_fp32(tmp_path):
    """And the generation settings of the folder."""
    tensors = {name: tensor.bfloat16() for name, tensor in release_tensors(release_config()).items()}
    folder = write_release(tmp_path / "hmf", release_config(), tensors)
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 5, "eos_token_id": [2, 9]}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    model = import_hmf(folder)
    assert {name: getattr(model.generation_config, name) for name in settings} == settings
    mixer = attention_module(model, 1)
    assert mixer.A_log.dtype == torch.float32 and mixer.q_proj.weight.dtype == torch.bfloat16
    torch.testing.assert_close(mixer.A_log, tensors["model.layers.1.gka.A_log"].float(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3"}, "model_type 'qwen3' .* hybrid_llama"),
        ({"model_type": "hybrid_qwen3_next"}, "is not of the GKA release"),
        ({"gka_config": None}, "has no gka_config"),
        ({"hybrid_override_pattern": "*-GDN-GKA"}, "layer 1 is of the kind 'GDN'"),
        ({"hybrid_override_pattern": "*-GKADA-GKA"}, "prime-unfuse"),
        ({"hybrid_override_pattern": "*-GKA"}, "has 2 entries, num_hidden_layers is 3"),
        ({"hybrid_override_pattern": None, "layer_types": ["*", "M2", "GKA"]}, "layer 1 is of the kind 'M2'"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        # of gka_config
        ({"spin": 1}, r"unknown settings \['spin'\]"),
        ({"num_q_heads": 8}, r"num_q_heads=8 \(the model has 4\)"),
        ({"solver_type": "cg"}, "solver_type='cg'"),
        ({"kv_proj_rank": 4}, "kv_proj_rank=4"),
        ({"use_forgetting_gate_kk": False}, "use_forgetting_gate_kk=False"),
    ],
)
def test_other_configurations_are_refused(tmp_path, change, message):
    folder, config = write_release(tmp_path / "hmf", release_config()), release_config()
    top = config.keys() | {"quantization_config"}
    config = config | change if change.keys() <= top else release_config(**change)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        import_hmf(folder)


def test_tensors_that_do_not_fit_are_refused(tmp_path):
    key, unknown = "model.layers.1.gka.alpha_proj.bias", "model.layers.1.gka.k_rep"
    lost = "model.layers.1.self_attn.q_norm.weight"
    changes = {
        f"lacks 1 tensors: {key}": lambda t: t.pop(key),
        f"1 tensors that the model does not have: {unknown}": lambda t: t.update({unknown: torch.zeros(2)}),
        f"1 tensors that the model does not have: {lost}": lambda t: t.update({lost: torch.zeros(D)}),
        r"alpha_proj.bias has shape \[3\], .* \[4\]": lambda t: t.update({key: torch.zeros(3)}),
        "1 tensors: model.layers.1.self_attn.A_log": lambda t: t["model.layers.1.gka.A_log"][1:2].fill_(math.nan),
    }
    for i, (message, change) in enumerate(changes.items()):
        tensors = release_tensors(release_config())
        change(tensors)
        with pytest.raises(ValueError, match=message):
            import_hmf(write_release(tmp_path / str(i), release_config(), tensors))


def test_broken_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has no config.json"):
        import_hmf(tmp_path / "nowhere")
    folder = write_release(tmp_path / "hmf", release_config())
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:2000])
    with pytest.raises(ValueError, match="corrupt or truncated"):
        import_hmf(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks the weight files model.safetensors"):
        import_hmf(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        import_hmf(folder)
