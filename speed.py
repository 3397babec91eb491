"""Faster generation on a CPU: PyTorch's compiler and a cache of fixed size, through transformers' own `generate`."""

import logging

from transformers import CompileConfig, PreTrainedModel

logger = logging.getLogger(__name__)

# A product with few rows is bound by reading the weights. Written as a sum of products, which this pass of Inductor
# does for inner and outer sizes up to the number given, it becomes one loop that streams them.
STREAM_WEIGHTS = {"decompose_mm_pass": {"cpu_max_other_dimension_decomposition": 65536}}


def fast_generation(model: PreTrainedModel) -> dict:
    """Return the arguments that make `model.generate` (or a pipeline of the model) fast.

        model.generate(**inputs, **fast_generation(model))

    The first call compiles, for half a minute or so on a CPU; PyTorch keeps the result on disk, which makes later
    starts shorter. A prompt is read by the model as it is, each further token by the compiled one. In float32 the
    greedy tokens are those of plain `generate`; in bfloat16 a near tie can fall the other way.

    Where it does not apply the result is empty, so that `generate` works as ever, and the log says why.
    """
    reason = obstacle(model)
    if reason:
        logger.warning("fast_generation does nothing: %s", reason)
        return {}
    if model.device.type != "cpu":
        return {"cache_implementation": "static"}  # transformers compiles for it by itself
    # Of no particular size: other lengths and batches do not compile again.
    compile_config = CompileConfig(
        mode=None, dynamic=True, fullgraph=False, options={"post_grad_fusion_options": STREAM_WEIGHTS}
    )
    compile_config._compile_all_devices = True  # else transformers compiles on accelerators only
    return {"cache_implementation": "static", "compile_config": compile_config}


def obstacle(model: PreTrainedModel) -> str | None:
    """Why `fast_generation` does not apply to a model, if it does not."""
    devices = {parameter.device.type for parameter in model.parameters()}
    if len(devices) > 1 or len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "the model is spread over several devices"
    if devices <= {"meta"}:
        return "the model's weights are not loaded"
    if model.config._attn_implementation not in ("eager", "sdpa"):
        return (
            f"it needs attention of fixed shapes, eager or sdpa, and the model has {model.config._attn_implementation}"
        )
    if model.config.rope_parameters["rope_type"] in ("dynamic", "longrope"):
        return f"rope_type={model.config.rope_parameters['rope_type']!r} changes its frequencies with the length"
    if devices == {"cpu"} and not has_compiler():
        return "PyTorch's compiler needs a C++ compiler, and none was found: install g++ or clang"
    return None


def has_compiler() -> bool:
    """Whether Inductor finds a C++ compiler."""
    from torch._inductor import cpp_builder, exc

    try:
        return bool(cpp_builder.get_cpp_compiler())
    except (exc.InvalidCxxCompiler, RuntimeError):
        return False
