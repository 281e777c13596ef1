"""Trained backbones for other programs: ONNX (fp32, fp16, int8) and arcface_torch's model.pt."""
