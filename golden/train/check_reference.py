"""Compare the exported model in float64 with a second implementation: a NumPy forward pass that reads the released layout.

    python check_reference.py DEMO_DIR k3_reference.py
"""
import importlib.util
import pathlib
import sys

import numpy

from export import read_safetensors


def main():
    demo, source = pathlib.Path(sys.argv[1]), sys.argv[2]
    spec = importlib.util.spec_from_file_location("k3_reference", source)
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    model, golden = reference.M(str(demo)), read_safetensors(demo / "golden/golden.safetensors")
    for name in sorted(n.removesuffix(".logits_f64") for n in golden if n.endswith(".logits_f64")):
        ours = golden[name + ".logits_f64"].numpy()
        theirs = reference.forward(model, golden[name + ".ids"].tolist())
        error = numpy.sqrt(((ours - theirs) ** 2).sum() / (theirs ** 2).sum())
        print(f"{name}: relative rms difference {error:.1e}, largest {abs(ours - theirs).max():.1e}")
        assert error < 1e-11, name


if __name__ == "__main__":
    main()
