"""Time and peak memory of conversions at the published sizes: python benchmarks/conversion.py

Memory is what the process holds at its peak, mapped pages of files included, less what it held before, as a multiple
of the size of the source. Each conversion runs in a process of its own.
"""

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SIZES = {"64M dense": {}, "198M mixture of experts": {"use_moe": True}}


def write_checkpoint(sizes: dict, path: Path):
    """A random float16 checkpoint as MiniMind's training leaves it, the tied weight stored twice."""
    import torch

    from minimind_hf import MiniMindConfig
    from minimind_hf.convert.layout import expected_shapes

    tensors = {name: torch.randn(shape).half() for name, shape in expected_shapes(MiniMindConfig(**sizes)).items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    torch.save(tensors, path)


def resident_bytes() -> int:
    """The memory that this process holds now, in bytes (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def measure(direction: str, source: Path, destination: Path):
    """Convert once; print seconds, and peak memory as a multiple of the size of the source."""
    from minimind_hf.convert import to_hf, to_torch

    convert = {"to-hf": to_hf, "to-torch": to_torch}[direction]
    before, peak, done = resident_bytes(), [0], threading.Event()

    def watch():
        while not done.wait(0.002):
            peak[0] = max(peak[0], resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    convert(source, destination)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    size = source.stat().st_size if source.is_file() else sum(file.stat().st_size for file in source.iterdir())
    print(f"{direction:<9} {size / 2**20:6.0f} MiB {seconds:6.2f} s {(peak[0] - before) / size:6.2f} x")


def main():
    with tempfile.TemporaryDirectory() as folder:
        for name, sizes in SIZES.items():
            checkpoint, converted = Path(folder) / f"{name}.pth", Path(folder) / name
            write_checkpoint(sizes, checkpoint)
            print(f"{name}, verified")
            for arguments in (
                ("to-hf", checkpoint, converted),
                ("to-torch", converted, checkpoint.with_suffix(".back.pth")),
            ):
                subprocess.run([sys.executable, __file__, *map(str, arguments)], check=True)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        measure(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
