"""The names of vLLM that the plugin overrides, calls or reads, each with its reason. All are private to vLLM or change
with its releases.

The sources of a version are read here, not imported: a wheel for another processor or another torch can be checked.
What the plugin imports by name is found in its own sources, and needs no row. For a table of versions:

    python -m hf_memmix.serving.vllm.private_names WHEEL_OR_FOLDER ...
"""

import ast
import re
import sys
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

from .versions import OLDEST, SPECULATION_SINCE, STATES_SINCE, numbers_of

PLUGIN = Path(__file__).parents[1]
# imported only if they are there (compat.py), and only with --states, which refuses versions without it (states.py)
OPTIONAL = {"resolve_kv_cache_layout", "KVConnectorTransferResults"}


class Name(NamedTuple):
    """A name that the plugin uses.

    Args:
        owner: "module:Class" or "module", without "vllm." in front.
        names: one of them must be there; they differ between versions.
        reason: what the plugin does with it.
        arguments: of a function, those that the plugin passes by name, or takes where it overrides the function.
        since: the first version of vLLM that has it; what needs it is refused with older ones.
    """

    owner: str
    names: tuple[str, ...]
    reason: str
    arguments: tuple[str, ...] = ()
    since: tuple[int, int] = OLDEST


_BASE = "model_executor.models.transformers.base:Base"
_MAMBA = "model_executor.layers.mamba.abstract:MambaBase"
_HYBRID = "model_executor.models.interfaces:IsHybrid"
_BUILDER = "v1.attention.backends.short_conv_attn:ShortConvAttentionMetadataBuilder"
_METADATA = "v1.attention.backends.mamba_attn:BaseMambaAttentionMetadata"
_BATCH = "v1.attention.backend:CommonAttentionMetadata"
_BACKEND = "v1.attention.backend:AttentionBackend"
_VERIFY = "model_executor.models.config:VerifyAndUpdateConfig"
_CACHE, _PARALLEL, _MODEL = "config:CacheConfig", "config:ParallelConfig", "config:ModelConfig"
_COMPILATION, _SCHEDULER, _ALL = "config:CompilationConfig", "config:SchedulerConfig", "config:VllmConfig"
_CONNECTOR = "distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
_RELOAD = "model_executor.model_loader.reload"

NAMES = (
    Name(_BASE, ("_patch_config",), "overridden: from there on the configuration is that of the backbone"),
    Name(_BASE, ("_create_hf_to_vllm_mapper",), "overridden: no tensor of a checkpoint is dropped"),
    Name(_BASE, ("pipeline_parallel",), "overridden: the mixers are put in before"),
    Name(_BASE, ("recursive_replace",), "overridden: the mixers are kept"),
    Name(_BASE, ("load_weights",), "overridden: a checkpoint must be complete", ("weights",)),
    Name(
        _BASE,
        ("create_attention_instances", "_create_attention_instances"),
        "overridden: memory layers have no attention (compat.py)",
    ),
    Name(_BASE, ("create_attention_instances", "attention_fusers"), "extended: memory layers have no attention"),
    Name(
        "model_executor.models.transformers.pooling:SequenceClassificationMixin",
        ("__init__",),
        "its classifier becomes the linear layer of a decoder",
        ("vllm_config", "prefix"),
    ),
    Name(_VERIFY, ("verify_and_update_model_config",), "overridden: says which layers have states", ("model_config",)),
    Name(_VERIFY, ("verify_and_update_config",), "overridden: refuses options, cuts graphs", ("vllm_config",)),
    Name(_HYBRID, ("get_mamba_state_shape_from_config",), "overridden: the page of a sequence", ("vllm_config",)),
    Name(_HYBRID, ("get_mamba_state_copy_func",), "overridden: a page is copied as a whole"),
    Name(_MAMBA, ("get_state_shape",), "overridden: the page of a sequence in a layer"),
    Name(_MAMBA, ("get_state_dtype",), "overridden: the page of a sequence in a layer"),
    Name(_MAMBA, ("mamba_type",), "overridden: a label"),
    Name(_MAMBA, ("get_attn_backend",), "overridden: names the metadata"),
    Name(_MAMBA, ("get_kv_cache_spec",), "called to count the sequences that fit", ("vllm_config",)),
    Name(_MAMBA, ("kv_cache",), "vLLM gives a layer its pages by this attribute"),
    Name(_BUILDER, ("build",), "overridden: one batch", ("common_prefix_len", "common_attn_metadata")),
    Name(_BUILDER, ("update_block_table",), "overridden: the same batch in the pages of other layers", ("metadata",)),
    Name(_BUILDER, ("_update_metadata_for_cudagraph_capture",), "called: pages where graphs of decode read them"),
    Name(_BUILDER, ("use_spec_decode",), "read: a batch without draft tokens needs less"),
    Name(_BUILDER, ("kv_cache_spec",), "read to find the pages of rows that decode"),
    *(
        Name(_METADATA, (field,), "read in every layer: the rows of a batch and their pages")
        for field in (
            "num_decode_tokens",
            "num_prefill_tokens",
            "num_prefills",
            "num_decodes",
            "num_reqs",
            "seq_lens",
            "state_indices_tensor_d",
            "state_indices_tensor_p",
            "has_initial_states_p",
            "query_start_loc_p",
            "query_start_loc_d",
            "num_accepted_tokens",
        )
    ),
    *(
        Name(
            module,
            ("ShortConvAttentionMetadataBuilder",),
            "listed: it is told how many draft tokens were accepted",
            since=SPECULATION_SINCE,
        )
        for module in ("v1.worker.gpu_model_runner", "v1.worker.gpu.model_states.mamba_hybrid")
    ),
    Name(_BACKEND, ("get_name",), "overridden"),
    Name(_BACKEND, ("get_builder_cls",), "overridden: names the builder of metadata"),
    Name(_BACKEND, ("is_ssm",), "overridden: states, no keys"),
    *(
        Name(_BATCH, (field,), "read to tell rows that decode from those that prefill, and where their pages are")
        for field in (
            "max_query_len",
            "is_prefilling",
            "query_start_loc_cpu",
            "seq_lens_cpu_upper_bound",
            "replace",
            "num_reqs",
            "num_actual_tokens",
            "block_table_tensor",
            "seq_lens",
        )
    ),
    Name("v1.attention.backends.registry:MambaAttentionBackendEnum", ("LINEAR",), "the label of a layer"),
    Name("forward_context:ForwardContext", ("attn_metadata",), "read in every layer: its metadata by its name"),
    Name("forward_context:ForwardContext", ("no_compile_layers",), "read by the operator: the layers by their names"),
    Name(
        "model_executor.models.transformers.utils",
        ("replace_linear_class",),
        "called for the linear layers of mixers",
        ("style", "prefix"),
    ),
    Name("_custom_ops", ("create_onednn_mm",), "wrapped: weights are packed with one number of threads (packing.py)"),
    Name(
        "model_executor.layers.logits_processor:LogitsProcessor",
        ("__init__",),
        "made with what the family does to its logits",
        ("scale", "soft_cap"),
    ),
    Name(
        "utils.torch_utils",
        ("direct_register_custom_op",),
        "called: the operator of memory layers",
        ("mutates_args", "fake_impl"),
    ),
    Name(_COMPILATION, ("_attention_ops",), "extended: graphs are cut at our operator"),
    Name(_COMPILATION, ("static_forward_context",), "extended: the table of layers with a cache"),
    *(
        Name(_CACHE, (field,), "read to refuse options and to count what fits")
        for field in (
            "enable_prefix_caching",
            "mamba_cache_mode",
            "mamba_cache_dtype",
            "mamba_ssm_cache_dtype",
            "cache_dtype",
            "kv_cache_memory_bytes",
            "kv_offloading_size",
            "gpu_memory_utilization",
        )
    ),
    *(
        Name(_PARALLEL, (field,), "read to refuse options and to divide mixers")
        for field in ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size")
    ),
    Name(_PARALLEL, ("use_ubatching",), "read to refuse it"),
    Name(_SCHEDULER, ("enable_chunked_prefill",), "read to refuse prefix caching without it"),
    Name(_SCHEDULER, ("disable_hybrid_kv_cache_manager",), "read to refuse it"),
    Name(_SCHEDULER, ("max_num_batched_tokens",), "read: a page is not longer, in tokens, than half a step"),
    Name(
        _SCHEDULER,
        ("long_prefill_token_threshold",),
        "read: a page is not longer, in tokens, than a piece of a prompt",
    ),
    Name(_SCHEDULER, ("max_num_seqs",), "read for the largest prefill that vLLM measures"),
    Name(_MODEL, ("quantization",), "read to refuse most of it"),
    Name(_ALL, ("quant_config",), "read to refuse a reload of quantised weights"),
    Name(_MODEL, ("max_model_len",), "read to refuse lengths that change rotary embeddings; set to count sequences"),
    Name(_MODEL, ("revision",), "read: the states on disk of another revision are others"),
    Name(_ALL, ("load_config",), "read to refuse a reload of weights with states on disk"),
    Name("config:LoadConfig", ("load_format",), "read to refuse a reload of weights with states on disk"),
    Name(_MODEL, ("get_num_kv_heads",), "called: a page as tokens of attention"),
    Name(_MODEL, ("get_head_size",), "called: a page as tokens of attention"),
    Name(_MODEL, ("get_num_experts",), "called to choose the class with fused experts"),
    *(
        Name(_ALL, (field,), "read to refuse it")
        for field in ("speculative_config", "lora_config", "kv_transfer_config")
    ),
    Name(
        "platforms.interface:Platform",
        ("update_block_size_for_backend",),
        "called to count the sequences that fit",
        ("vllm_config",),
    ),
    Name("engine.arg_utils:EngineArgs", ("from_cli_args",), "called to read the options of the command"),
    Name("engine.arg_utils:EngineArgs", ("create_engine_config",), "called to read the options of the command"),
    *(
        Name(_CONNECTOR, (name,), "overridden: states on disk", arguments)
        for name, arguments in {
            "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
            "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
            "build_connector_meta": ("scheduler_output",),
            "register_kv_caches": ("kv_caches",),
            "start_load_kv": ("forward_context",),
            "wait_for_save": (),
        }.items()
    ),
    Name(_CONNECTOR, ("get_transfer_results",), "overridden: loads that have ended", since=STATES_SINCE),
    Name(_RELOAD, ("initialize_layerwise_reload",), "vLLM calls the model's load_weights after it"),
    Name(_RELOAD, ("finalize_layerwise_reload",), "vLLM calls the model's load_weights before it"),
)


class Sources:
    """The Python sources of one version of vLLM, in a wheel or in a folder of packages."""

    def __init__(self, root: Path):
        self.root, self.trees = root, {}
        self.wheel = ZipFile(root) if root.is_file() else None

    def lacks(self, row: Name) -> str | None:
        """What of a row is not in these sources, in one line; None if all is."""
        module, _, owner = row.owner.partition(":")
        module = f"vllm.{module}" if module else "vllm"
        where = f"{module}.{owner}" if owner else module
        members = self.members(module, owner) if owner else self.definitions(module)
        if members is None:
            return f"{where} is gone ({row.names[0]}: {row.reason})"
        found = [members[name] for name in row.names if name in members]
        if not found:
            return f"{where} has no {' or '.join(row.names)} ({row.reason})"
        for node in found:
            known = _arguments(node)
            if known is not None and (missing := [name for name in row.arguments if name not in known]):
                return f"{where}.{row.names[0]} takes no {', '.join(missing)} ({row.reason})"
        return None

    def version(self) -> tuple[int, int]:
        found = re.search(r"version = '([^']+)'", self._text("vllm/_version.py") or "")
        return numbers_of(found[1]) if found else OLDEST

    def members(self, module: str, name: str) -> dict[str, ast.AST] | None:
        """What a class defines, inherits, or sets as an attribute of `self`, by name; None if there is no class."""
        module, node = self._resolve(module, name)
        if not isinstance(node, ast.ClassDef):
            return None
        found = {}
        for base in node.bases:
            while isinstance(base, ast.Subscript):
                base = base.value
            if isinstance(base, ast.Name):
                found |= self.members(module, base.id) or {}
        for child in ast.walk(node):
            if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store) and _is_self(child.value):
                found[child.attr] = child
        return found | _defined(node.body)

    def definitions(self, module: str) -> dict[str, ast.AST] | None:
        """What a module defines or imports, by name; None if there is no such module."""
        tree = self._tree(module)
        if tree is None:
            return None
        found = _defined(tree.body)
        for source in _stars(tree):
            found |= self.definitions(self._absolute(module, source)) or {}
        return {name: self._resolve(module, name)[1] or node for name, node in found.items()}

    def _resolve(self, module: str, name: str) -> tuple[str, ast.AST | None]:
        """The module that defines a name, and its definition there; imports are followed."""
        tree = self._tree(module)
        node = None if tree is None else _defined(tree.body).get(name)
        if not isinstance(node, ast.ImportFrom):
            return module, node
        source = self._absolute(module, node)
        original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        if self._tree(f"{source}.{original}") is not None:
            return f"{source}.{original}", self._tree(f"{source}.{original}")
        return self._resolve(source, original) if source != module else (module, None)

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        """The module that an import in `module` reads."""
        if not node.level:
            return node.module
        is_package = self._text(f"{module.replace('.', '/')}/__init__.py") is not None
        parents = module.split(".") if is_package else module.split(".")[:-1]
        return ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [node.module])])

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self.trees:
            path = module.replace(".", "/")
            text = self._text(f"{path}.py") or self._text(f"{path}/__init__.py")
            self.trees[module] = None if text is None else ast.parse(text)
        return self.trees[module]

    def _text(self, path: str) -> str | None:
        try:
            data = (self.root / path).read_bytes() if self.wheel is None else self.wheel.read(path)
        except (KeyError, OSError):
            return None
        return data.decode()


def _defined(body: list[ast.stmt]) -> dict[str, ast.AST]:
    """The names that statements define, those in branches too."""
    found = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, (ast.ImportFrom, ast.Import)):
            found |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, (ast.If, ast.Try)):
            found |= _defined(node.body) | _defined(node.orelse)
            for handler in getattr(node, "handlers", ()):
                found |= _defined(handler.body)
    return found


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _stars(tree: ast.Module) -> list[ast.ImportFrom]:
    return [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]


def _arguments(node: ast.AST) -> set[str] | None:
    """The names of a function's arguments; None if it is no function, or takes any."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.args.kwarg:
        return None
    return {argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}


def imported() -> tuple[Name, ...]:
    """A row for each name that the modules of the plugin import from vLLM."""
    found = {}
    for file in sorted(PLUGIN.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module.partition(".")[0] == "vllm":
                module = node.module.partition(".")[2]
                for alias in node.names:
                    if alias.name not in OPTIONAL:
                        found[module, alias.name] = Name(module, (alias.name,), f"imported by {file.name}")
    return tuple(found.values())


def missing(root: Path) -> list[str]:
    """What the sources of vLLM in a wheel or a folder lack, a line for each name."""
    sources = Sources(root)
    rows = [row for row in (*NAMES, *imported()) if row.since <= sources.version()]
    return [line for row in rows if (line := sources.lacks(row))]


if __name__ == "__main__":
    rows = len(NAMES) + len(imported())
    for argument in sys.argv[1:]:
        lines = missing(Path(argument))
        print(f"{argument}: {rows - len(lines)} of {rows} names", *lines, sep="\n  ")
