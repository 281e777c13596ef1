"""What other programs write that is no model here, by the names of files, and what can be done."""

_VECTORS = (
    "export it to ONNX there, or embed your images there: train, search and evaluate take vectors (docs/vectors.md)"
)
# By a file's kind and name, or by the names in a folder: what other programs write, and what can be done.
OTHERS = {
    r"\.params\b|symbol\.json": "a network of MXNet: `partial-fc convert` makes model.safetensors of its .params file",
    r"\.index\.json": "Hugging Face's index of several files: torch.save(model.state_dict(), FILE) makes one",
    r"zero_pp_rank|mp_rank_|global_step\d": "a checkpoint of DeepSpeed: its zero_to_fp32.py makes one file of it",
    r"\.distcp|\.metadata": "a checkpoint of torch.distributed.checkpoint (FSDP): "
    "`python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER model.pt` makes one file of it",
    r"\.mdl\b": "a checkpoint of Caffe2: save its blobs there under torch's names, "
    "torch.save({NAME: torch.tensor(workspace.FetchBlob(BLOB)), ...}, FILE)",
    r"HDF5|\.h5\b|\.keras\b": f"a model of Keras: {_VECTORS}",
    r"\.tflite\b|\.pb\b|\.index\b|\.data-\d": f"a model of TensorFlow: {_VECTORS}",
    r"\.(engine|plan|trt)\b": "an engine of TensorRT, compiled for a GPU: give the .onnx that it was built from",
    r"\.(mlmodel|mlpackage|caffemodel|gguf|param|xml|mnn|rknn)\b": f"a model of another program: {_VECTORS}",
}
