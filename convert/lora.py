"""MiniMind's LoRA files: to and from PEFT adapter folders, and merged into the model that they belong to."""

import hashlib
import json
import math
import re
import shutil
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from huggingface_hub import ModelCardData

from minimind_hf.convert.checkpoint import (
    ROTARY_PROJECTIONS,
    Checkpoint,
    cast_tensors,
    exact_dtype,
    load_checkpoint,
)
from minimind_hf.convert.compare import compare_logits, compare_tensors, digests
from minimind_hf.convert.conversions import assumed, own_layout, to_state_dict, verify_folder, write_folder
from minimind_hf.convert.files import (
    MINIMIND_FOLDER,
    TORCH_FILE,
    Output,
    check_destination,
    read_json,
    read_tensors,
    write_safetensors,
    written_whole,
)
from minimind_hf.convert.generations import GENERATIONS, names_in
from minimind_hf.convert.layout import ConversionError, clean_names, pair_halves, some_names
from minimind_hf.convert.loading import build_model
from minimind_hf.convert.tokenizer import copy_tokenizer, find_tokenizer, take_special_tokens, tokenizer_files

PEFT_FOLDER = Output("adapter_config.json")
PEFT_PREFIX = "base_model.model."
PEFT_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # PEFT itself prefers the first
LORA_SUFFIXES = (".lora.A.weight", ".lora.B.weight")
PEFT_SUFFIXES = (".lora_A.weight", ".lora_B.weight")

# The Linear layers of a MiniMind model; routers and routed experts hold their weights in another way.
LINEAR = re.compile(
    r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(shared_experts\.\d+\.)?(gate|up|down)_proj)|lm_head"
)

IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")

# Keys of an adapter_config.json that change nothing about W + scaling * B A, or that `scaling_of` takes into account.
# Which layers carry a LoRA is seen from the tensors.
PEFT_KEYS = set(
    "peft_type task_type auto_mapping peft_version base_model_name_or_path revision inference_mode "
    "r lora_alpha use_rslora rank_pattern alpha_pattern lora_dropout target_modules exclude_modules "
    "layers_to_transform layers_pattern init_lora_weights loftq_config eva_config corda_config lora_ga_config "
    "megatron_core qalora_group_size runtime_config".split()
)
# What switches on a feature that W + B A cannot express, and what would be lost. Any other key must be switched off.
PEFT_FEATURES = {
    "use_dora": "the magnitudes of DoRA",
    "lora_bias": "the biases of the LoRA",
    "modules_to_save": "the modules trained in full",
    "trainable_token_indices": "the retrained token embeddings",
    "target_parameters": "the LoRA of parameters that are no Linear layers",
    "layer_replication": "the repeated layers",
    "fan_in_fan_out": "the transposed weights, which no MiniMind model has",
}
# The other initialisations (pissa, olora, corda, loftq, …) change the weights of the model itself before training.
PLAIN_INITIALISATIONS = (True, False, None, "gaussian", "orthogonal", "eva", "mica")

TOLERANCE = 1e-4  # for logits in float32, as `minimind verify` has it


@dataclass(frozen=True)
class LowRank:
    """What a LoRA adds to the weight of one Linear layer: scaling * B A."""

    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank]
    scaling: float = 1.0

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def delta(self) -> torch.Tensor:
        """Multiply out, in float32 [out, in]."""
        return self.scaling * (self.b.float() @ self.a.float())


def lora_to_peft(
    source: Path, destination: Path, base: str | None = None, overwrite: bool = False, verify: bool = True
) -> str:
    """Convert a LoRA of MiniMind's training to an adapter folder that `peft.PeftModel.from_pretrained` loads.

    Args:
        source: the LoRA file, with MODULE.lora.A.weight and MODULE.lora.B.weight.
        destination: the folder to write; it appears whole, or not at all.
        base: the model that the LoRA belongs to, a folder or a repository, for PEFT to find it. The LoRA must fit a
            MiniMind folder; that of an early generation needs one, which tells the size of a head.
        overwrite: replace an existing adapter folder.
        verify: read the adapter back and compare every bit.

    Returns:
        One line that says what was verified.

    Raises:
        ConversionError: the file is not a LoRA that PEFT can express, or not one of `base`; nothing was written.
    """
    source, destination = Path(source), Path(destination)
    is_local = base is not None and Path(base).exists()
    sources = [source, Path(base)] if is_local else [source]
    check_destination(destination, sources, overwrite, PEFT_FOLDER)
    model = open_base(Path(base)) if is_local else None
    adapter = translate(read_lora(source), source, model and model.config.head_dim)
    if model is not None:
        check_fit(adapter, model, source)
    with written_whole(destination, sources, overwrite, PEFT_FOLDER) as draft:
        write_peft(adapter, draft, None if base is None else str(base), is_local)
        if not verify:
            return "not verified"
        written = read_peft(draft)
        if any(update.scaling != 1 for update in written.values()):
            raise ConversionError("verification failed: the adapter that was written scales its updates")
        counted = compare_tensors(to_tensors(written, PEFT_SUFFIXES), to_tensors(adapter, PEFT_SUFFIXES))
        return f"verified: {counted} read back bit for bit equal"


def peft_to_lora(source: Path, destination: Path, overwrite: bool = False, verify: bool = True) -> str:
    """Convert a PEFT adapter folder to the LoRA file that MiniMind's own scripts load.

    MiniMind knows no alpha: a scaling other than 1 becomes part of B. It knows one rank, and a LoRA on every square
    layer: lower ranks and layers without a LoRA are filled up with zeros, which add nothing.

    Args:
        source: the adapter folder.
        destination: the .pth file to write; it appears whole, or not at all.
        overwrite: replace an existing file.
        verify: read the file back and compare every bit.

    Returns:
        One line that says what was verified, and what was changed for MiniMind.

    Raises:
        ConversionError: something of the adapter would be lost; nothing was written.
    """
    source, destination = Path(source), Path(destination)
    check_destination(destination, [source], overwrite, TORCH_FILE)
    adapter = translate(read_peft(source), source)
    check_minimind_can_load(adapter, source)
    folded, notes = fold_scaling(adapter)
    complete, more_notes = fill_up(folded)
    tensors = to_tensors(complete, LORA_SUFFIXES)
    with written_whole(destination, [source], overwrite, TORCH_FILE) as draft:
        torch.save(tensors, draft)
        verified = "not verified"
        if verify:
            verified = f"verified: {compare_tensors(read_tensors(draft), tensors)} read back bit for bit equal"
        return "; ".join([verified, *notes, *more_notes])


def merge_lora(
    base: Path,
    adapter: Path,
    destination: Path,
    tokenizer: Path | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    verify: bool = True,
    config: Path | None = None,
    **flags,
) -> str:
    """Merge an adapter into its model, in float32 and cast once.

    Args:
        base: the model, a .pth file or a MiniMind folder.
        adapter: a LoRA file of MiniMind's training, or a PEFT adapter folder.
        destination: the folder to write, or a .pth file for MiniMind's own scripts; it appears whole, or not at all.
        tokenizer: a folder whose tokenizer files are copied along; by default those of the base folder.
        dtype: "float32", "float16" or "bfloat16"; by default that of the base.
        overwrite: replace an existing result.
        verify: compare the logits with those of the base with the adapter beside it, and read the result back.
        config: a config.json with what the tensors of a .pth base cannot tell.
        **flags: config values of the base, such as num_attention_heads, as in `to_hf`.

    Returns:
        One line that says what was verified.

    Raises:
        ConversionError: base and adapter do not fit, or the base has this adapter in it; nothing was written.
    """
    base, source, destination = Path(base), Path(adapter), Path(destination)
    output = TORCH_FILE if destination.suffix.lower() == ".pth" else MINIMIND_FOLDER
    if output is TORCH_FILE and tokenizer is not None:
        raise ConversionError(
            f"--tokenizer {tokenizer}, but the file {destination} has no place for it: name a folder"
        )
    found_tokenizer = find_tokenizer(base, tokenizer) if output is MINIMIND_FOLDER else None
    inputs = [base, source, config, *tokenizer_files(found_tokenizer)]
    check_destination(destination, inputs, overwrite, output)
    checkpoint = load_checkpoint(base, config, flags)
    adapter = read_peft(source) if source.is_dir() else read_lora(source)
    adapter = translate(adapter, source, checkpoint.config.head_dim)
    check_fit(adapter, checkpoint, source)
    merged = replace(
        checkpoint,
        tensors=checkpoint.tensors | merge_weights(checkpoint, adapter, source),
        config=record_merge(checkpoint.config, adapter, source),
    )
    dtype = dtype or str(exact_dtype(checkpoint.tensors)).removeprefix("torch.")
    result = replace(merged, tensors=cast_tensors(merged.tensors, dtype))
    if tokenizer is not None:
        given = config or (base / "config.json" if base.is_dir() else None)
        take_special_tokens(result.config, Path(tokenizer), read_json(given) if given else {})

    with written_whole(destination, inputs, overwrite, output) as draft:
        tensors, note = result.tensors, ""
        if output is TORCH_FILE:
            tensors = to_state_dict(result, own_layout(checkpoint))
            torch.save(tensors, draft)
            note = "; a .pth file cannot record the merge: merging the adapter into it again would go unnoticed"
        else:
            write_folder(result, draft)
            copy_companions(base, draft, tokenizer)
        note += assumed(checkpoint)
        if not verify:
            return f"not verified{note}"
        if output is TORCH_FILE:
            compare_tensors(read_tensors(draft), tensors)
        else:
            verify_folder(draft, result.config, digests(tensors))
        compared = compare_merge(checkpoint, adapter, merged, result)
        return f"verified: {compared}; {len(tensors)} tensors read back bit for bit equal{note}"


# Reading.


def read_lora(path: Path) -> dict[str, LowRank]:
    """Read a LoRA file of MiniMind's training.

    Returns:
        The update of each layer by the layer's name, as it stands in the file.

    Raises:
        ConversionError: the file holds something else, or a half of an update is missing or of another shape.
    """
    if path.is_dir():
        raise ConversionError(f"{path} is a folder: expected the .pth file of a LoRA of MiniMind's training")
    return pair_up(read_tensors(path), LORA_SUFFIXES, path)


def read_peft(folder: Path) -> dict[str, LowRank]:
    """As `read_lora`, for a PEFT adapter folder; whatever is more than scaling * B A is refused."""
    if not (folder / "adapter_config.json").is_file():
        raise ConversionError(f"{folder} is not a PEFT adapter folder: it holds no adapter_config.json")
    settings = read_json(folder / "adapter_config.json")
    check_peft_config(settings, folder)
    path = next((folder / name for name in PEFT_WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        raise ConversionError(f"{folder} is not a whole PEFT adapter folder: it holds no {' or '.join(PEFT_WEIGHTS)}")
    tensors = read_tensors(path)
    foreign = [name for name in tensors if not name.startswith(PEFT_PREFIX)]
    if foreign:
        raise ConversionError(f"{path} holds {some_names(foreign)}: the names of an adapter start with {PEFT_PREFIX}")
    tensors = clean_names({name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()})
    copies = [name for name in tensors if name.endswith(".base_layer.weight")]
    if copies:
        raise ConversionError(
            f"{path} holds {some_names(copies)}, the weights of the model itself: save the adapter again with "
            "save_pretrained(…, save_embedding_layers=False)"
        )
    updates = pair_up(tensors, PEFT_SUFFIXES, path)
    return {
        module: replace(update, scaling=scaling_of(module, update, settings)) for module, update in updates.items()
    }


def pair_up(tensors: dict[str, torch.Tensor], suffixes: tuple[str, str], path: Path) -> dict[str, LowRank]:
    """Bring the two halves of each update together, and check that there is nothing else."""
    unknown = [name for name in tensors if not name.endswith(suffixes)]
    if unknown or not tensors:
        raise ConversionError(
            f"{path} holds {some_names(unknown) or 'no tensor at all'}: expected MODULE{suffixes[0]} and "
            f"MODULE{suffixes[1]} of Linear layers and nothing else"
        )
    first, second = ({n.removesuffix(s): t for n, t in tensors.items() if n.endswith(s)} for s in suffixes)
    lonely = [f"{name}{suffixes[name in first]}" for name in first.keys() ^ second.keys()]
    if lonely:
        raise ConversionError(f"{path} lacks {some_names(lonely)}, the other half of an update")
    for module, a in first.items():
        b = second[module]
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or 0 in (*a.shape, *b.shape):
            raise ConversionError(
                f"{module} in {path} has A {list(a.shape)} and B {list(b.shape)}: expected [rank, in] and [out, rank]"
            )
    return {module: LowRank(a, second[module]) for module, a in first.items()}


def translate(adapter: dict[str, LowRank], source: Path, head_dim: int | None = None) -> dict[str, LowRank]:
    """Bring an adapter of an early generation to the names and the order of rows of layout.py.

    Args:
        adapter: of any generation.
        source: where it comes from, for messages.
        head_dim: size of a head, which the tensors do not tell; only an early generation needs it.

    Raises:
        ConversionError: it changes something that is no Linear layer of a MiniMind model, or needs head_dim.
    """
    names = names_in([f"{module}.weight" for module in adapter], GENERATIONS["minimind2-early"])
    modules = {own: names.get(f"{own}.weight", f"{own}.weight").removesuffix(".weight") for own in adapter}
    foreign = [own for own, module in modules.items() if not LINEAR.fullmatch(module)]
    if foreign:
        raise ConversionError(
            f"{source} changes {some_names(foreign)}: expected Linear layers of a MiniMind model, which are the "
            "projections of attention, feed-forward and shared experts, and lm_head; not embeddings, norms, routers "
            "and routed experts"
        )
    if len(set(modules.values())) < len(modules):
        raise ConversionError(f"{source} mixes names of an early generation with those of a later one")
    translated = {}
    for own, module in modules.items():
        update = adapter[own]
        if own != module and f"{module}.weight".endswith(ROTARY_PROJECTIONS):
            if head_dim is None:
                raise ConversionError(
                    f"{source} is of an early MiniMind2 or a MiniMind v1, where the order of rows depends on the size "
                    "of a head: lora-to-peft reads it from --base, the folder that to-hf made of the model, and "
                    "merge-lora from the model"
                )
            if update.b.shape[0] % head_dim:
                raise ConversionError(
                    f"{own} in {source} has {update.b.shape[0]} rows, which are no whole heads of {head_dim} rows"
                )
            update = replace(update, b=pair_halves(update.b, head_dim))
        translated[module] = update
    return translated


def open_base(base: Path) -> Checkpoint | None:
    """Open the model that PEFT is to put an adapter on; None if it is of another architecture than MiniMind's own."""
    if not base.is_dir():
        raise ConversionError(f"--base {base} is a file: PEFT needs a model folder, which to-hf makes of it")
    config = base / "config.json"
    is_minimind = config.is_file() and read_json(config).get("model_type") == "minimind"
    return load_checkpoint(base) if is_minimind else None


def check_peft_config(settings: dict, folder: Path):
    """Raise where an adapter is more than scaling * B A, or depends on another base than the one it is used with."""
    if settings.get("peft_type") != "LORA":
        raise ConversionError(f"{folder} is a PEFT adapter of type {settings.get('peft_type')}, expected LORA")
    if settings.get("bias") not in (None, "none"):
        raise ConversionError(f"bias is {settings['bias']!r} in {folder}: the trained biases would be lost")
    for key, value in settings.items():
        if value and key not in PEFT_KEYS and key != "bias":
            lost = PEFT_FEATURES.get(key, "a feature that is unknown here")
            raise ConversionError(f"{key} is {value!r} in {folder}: {lost} would be lost")
    start = settings.get("init_lora_weights")
    if start not in PLAIN_INITIALISATIONS:
        raise ConversionError(
            f"init_lora_weights is {start!r} in {folder}, which changes the weights of the model before training: "
            "the adapter belongs to those. PEFT converts it to a plain one: save_pretrained with "
            "path_initial_model_for_weight_conversion"
        )


def scaling_of(module: str, update: LowRank, settings: dict) -> float:
    """Compute the factor of an update from the config of its adapter: alpha / rank, or alpha / sqrt(rank)."""
    rank = pattern_value(settings, "rank_pattern", module, settings.get("r"))
    alpha = pattern_value(settings, "alpha_pattern", module, settings.get("lora_alpha"))
    if rank != update.rank:
        raise ConversionError(f"{module} has rank {update.rank} in the tensors, but {rank} in adapter_config.json")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) < 1e30:
        raise ConversionError(f"lora_alpha of {module} is {alpha!r} in adapter_config.json: expected a number")
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def pattern_value(settings: dict, key: str, module: str, default):
    """Look a module up as PEFT does: the first pattern counts that matches the name, or the end of it after a dot."""
    patterns = settings.get(key) or {}
    try:
        return next((value for p, value in patterns.items() if re.match(rf"(.*\.)?({p})$", module)), default)
    except (re.error, AttributeError) as error:
        raise ConversionError(f"{key} in adapter_config.json is no dict of regular expressions: {error}") from error


# Writing.


def to_tensors(adapter: dict[str, LowRank], suffixes: tuple[str, str]) -> dict[str, torch.Tensor]:
    """Name both halves of every update as the reference implementation or as PEFT does."""
    prefix = PEFT_PREFIX if suffixes is PEFT_SUFFIXES else ""
    return {
        f"{prefix}{module}{suffix}": half
        for module, update in adapter.items()
        for suffix, half in zip(suffixes, (update.a, update.b), strict=True)
    }


def write_peft(adapter: dict[str, LowRank], folder: Path, base: str | None, base_is_local: bool):
    """Write an adapter with scaling 1: config, tensors, and a card where the folder has none."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConversionError("this needs PEFT: pip install 'minimind-hf[peft]'") from error
    rank = Counter(update.rank for update in adapter.values()).most_common(1)[0][0]
    other_ranks = {module: update.rank for module, update in adapter.items() if update.rank != rank}
    settings = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
        target_modules=list(adapter),
        r=rank,
        lora_alpha=rank,
        lora_dropout=0.0,
        rank_pattern=other_ranks,
        alpha_pattern=dict(other_ranks),
    ).to_dict()
    settings["target_modules"] = sorted(settings["target_modules"])  # a set, whose order changes from run to run
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")
    write_safetensors(to_tensors(adapter, PEFT_SUFFIXES), folder / PEFT_WEIGHTS[0])
    if not (folder / "README.md").exists():
        (folder / "README.md").write_text(peft_card(adapter, base, base_is_local), encoding="utf-8")


def peft_card(adapter: dict[str, LowRank], base: str | None, base_is_local: bool) -> str:
    metadata = ModelCardData(
        library_name="peft",
        pipeline_tag="text-generation",
        base_model=None if base_is_local else base,  # a path means nothing to others
        tags=["minimind", "lora"],
    )
    kinds = sorted({module.rpartition(".")[2] for module in adapter})
    ranks = ", ".join(map(str, sorted({update.rank for update in adapter.values()})))
    base = "BASE_MODEL" if base is None or base_is_local else base
    return f"""---
{metadata.to_yaml()}
---

# LoRA of a MiniMind model

A LoRA of {len(adapter)} layers ({", ".join(kinds)}), rank {ranks}, made of a LoRA file of
[MiniMind](https://github.com/jingyaogong/minimind)'s training. The updates are not scaled: `lora_alpha` is the rank.

```python
import minimind_hf
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({json.dumps(base)})
model = PeftModel.from_pretrained(model, "PATH_OR_REPOSITORY")
```
"""


# To MiniMind.


def check_minimind_can_load(adapter: dict[str, LowRank], source: Path):
    """Raise where MiniMind's own loader would lose an update, or miss one that cannot be known here."""
    oblong = [name for name, update in adapter.items() if update.a.shape[1] != update.b.shape[0]]
    if oblong:
        raise ConversionError(
            f"{some_names(oblong)} in {source} are not square, and MiniMind attaches a LoRA to square layers only: "
            "these would be lost. merge-lora puts everything into the model"
        )
    layers = {int(match[1]) for match in map(IN_LAYER.fullmatch, adapter) if match}
    selected = read_json(source / "adapter_config.json").get("layers_to_transform")
    if selected not in (None, []) or layers != set(range(len(layers))):
        raise ConversionError(
            f"{source} is for the layers {sorted(layers)} only, and MiniMind's loader wants a LoRA for every layer: "
            "merge-lora puts it into the model"
        )


def fold_scaling(adapter: dict[str, LowRank]) -> tuple[dict[str, LowRank], list[str]]:
    """Multiply B by the scaling: exactly where a dtype holds the result, else rounded to float32; and say which."""
    folded, notes = {}, []
    for module, update in adapter.items():
        product = update.b.double() * update.scaling
        exact = [t for t in (update.b.dtype, torch.float32) if torch.equal(product.to(t).double(), product)]
        b = product.to(exact[0] if exact else torch.float32)
        if not torch.isfinite(b).all():
            raise ConversionError(f"the scaling {update.scaling:g} takes B of {module} beyond the range of float32")
        folded[module] = LowRank(update.a, b)
        if update.scaling != 1:
            how = "exactly" if exact else "rounded to float32"
            notes.append(f"the scaling {update.scaling:.6g} was multiplied into B, {how}")
    return folded, list(dict.fromkeys(notes))


def fill_up(adapter: dict[str, LowRank]) -> tuple[dict[str, LowRank], list[str]]:
    """Give all updates one rank and all layers the same updates, by zeros, which add nothing; and say how many.

    Where q_proj is square, so is o_proj, and the other way round.
    """
    rank = max(update.rank for update in adapter.values())
    lower = [module for module, update in adapter.items() if update.rank < rank]
    complete = dict(adapter)
    for module in lower:
        a, b, more = adapter[module].a, adapter[module].b, rank - adapter[module].rank
        complete[module] = LowRank(F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more)))

    places = [match for match in map(IN_LAYER.fullmatch, adapter) if match]
    parts, both = {match[2] for match in places}, {"self_attn.q_proj", "self_attn.o_proj"}
    parts |= both if parts & both else set()
    wanted = {f"model.layers.{layer}.{part}" for layer in {match[1] for match in places} for part in parts}
    added = sorted(wanted - adapter.keys())
    for module in added:
        like = complete[places[0][0]]
        complete[module] = LowRank(torch.zeros_like(like.a), torch.zeros_like(like.b))

    notes = [f"{len(lower)} of a lower rank were filled up with zeros to rank {rank}"] if lower else []
    notes += [f"{len(added)} layers that MiniMind expects a LoRA on got one of zeros"] if added else []
    return complete, notes


# Merging.


def check_fit(adapter: dict[str, LowRank], checkpoint: Checkpoint, source: Path):
    """Raise unless the model has a layer of the right shape for every update, which is its alone."""
    for module, update in adapter.items():
        weight = checkpoint.tensors.get(f"{module}.weight")
        if module == "lm_head" and checkpoint.config.tie_word_embeddings:
            raise ConversionError(
                f"{source} changes lm_head, whose weight is the embedding table too (tie_word_embeddings) in "
                f"{checkpoint.source}: merging would change the embeddings. Untie the model first"
            )
        if weight is None:
            raise ConversionError(f"{source} changes {module}, which {checkpoint.source} does not have")
        shape = (update.b.shape[0], update.a.shape[1])
        if tuple(weight.shape) != shape:
            raise ConversionError(
                f"{module} is {list(weight.shape)} in {checkpoint.source}, but {source} is for one of {list(shape)}"
            )


def merge_weights(checkpoint: Checkpoint, adapter: dict[str, LowRank], source: Path) -> dict[str, torch.Tensor]:
    """Compute W + scaling * B A in float32 for every layer that has an update."""
    merged = {}
    for module, update in adapter.items():
        name = f"{module}.weight"
        merged[name] = checkpoint.tensors[name].float() + update.delta()
        if not torch.isfinite(merged[name]).all():
            raise ConversionError(f"{name} merged holds infinity: {source} is not for this model, or diverged")
    if all(torch.equal(weight, checkpoint.tensors[name].float()) for name, weight in merged.items()):
        raise ConversionError(f"{source} changes no weight: it was saved before its training, or holds zeros")
    return merged


def fingerprint(adapter: dict[str, LowRank]) -> str:
    """Hash what an adapter adds, so that a file and its conversions to other forms have one hash.

    The scaling counts as part of B, and components that are zero do not count.
    """
    digest = hashlib.sha256()
    for module, update in sorted(adapter.items()):
        a, b = update.a.float(), (update.b.double() * update.scaling).float()
        used = (a != 0).any(dim=1) & (b != 0).any(dim=0)
        for half in (a[used], b[:, used]) if used.any() else ():
            digest.update(f"{module} {list(half.shape)} ".encode() + half.contiguous().numpy().tobytes())
    return digest.hexdigest()


def record_merge(config, adapter: dict[str, LowRank], source: Path):
    """Return the config with the adapter's hash in `merged_adapters`.

    Raises:
        ConversionError: the hash stands there already.
    """
    earlier = getattr(config, "merged_adapters", [])
    if not isinstance(earlier, list) or not all(isinstance(entry, str) for entry in earlier):
        raise ConversionError(f"merged_adapters in the config is {earlier!r}: expected a list of hashes")
    added = fingerprint(adapter)
    if added in earlier:
        raise ConversionError(
            f"{source} has been merged into this model already (merged_adapters in its config): "
            "merging twice would double it"
        )
    config = deepcopy(config)
    config.merged_adapters = [*earlier, added]
    return config


def copy_companions(base: Path, draft: Path, tokenizer: Path | None):
    """Add the tokenizer; and the generation settings of a base folder, unless the tokenizer is another one."""
    found = find_tokenizer(base, tokenizer)
    if found is not None:
        copy_tokenizer(found, draft)
    if tokenizer is None and (base / "generation_config.json").is_file():
        shutil.copyfile(base / "generation_config.json", draft / "generation_config.json")


def compare_merge(base: Checkpoint, adapter: dict[str, LowRank], merged: Checkpoint, result: Checkpoint) -> str:
    """Check the logits of the float32 merge against those of the base with the adapter beside it.

    Args:
        base: the model before the merge.
        adapter: what was merged.
        merged: the merge in float32.
        result: the merge as it was written; what the cast changes is stated, not judged.
    """
    unmerged, in_float32 = build_model(base), build_model(merged)
    attach(adapter, unmerged)
    for seed in range(3):  # rounding alone can send a token to another expert; wrong weights show in every batch
        difference = compare_logits(in_float32, unmerged, seed=seed).max_difference
        if difference <= TOLERANCE:
            break
    else:
        raise ConversionError(
            f"verification failed: the logits of the merge differ by {difference:.3g} from those of the base with the "
            f"adapter beside it, more than {TOLERANCE:g}"
        )
    text = f"logits differ by at most {difference:.2g} from those of the base with the adapter beside it"
    dtype = next(iter(result.tensors.values())).dtype
    if dtype == torch.float32:
        return text
    cast = compare_logits(build_model(result), unmerged).max_difference
    return f"{text} in float32, by {cast:.2g} once the weights are {str(dtype).removeprefix('torch.')}"


def attach(adapter: dict[str, LowRank], model):
    """Make the Linear layers of a model add scaling * B A x, in float32."""

    def add(update):
        return lambda _, inputs, output: (
            output + update.scaling * F.linear(F.linear(inputs[0], update.a.float()), update.b.float())
        )

    for module, update in adapter.items():
        model.get_submodule(module).register_forward_hook(add(update))
