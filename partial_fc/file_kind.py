"""What a file is by its first bytes, for readers that find another kind than they expect."""

import os
import re

from partial_fc.files import regular

HEAD_BYTES = 512  # tar's magic number is at 257
TEXT, LMDB = "text", "an LMDB"
# In order: a later pattern may match what an earlier one names.
_KINDS = {
    rb"\xff\xd8\xff": "a JPEG picture",
    rb"\x89PNG\r\n\x1a\n": "a PNG picture",
    rb"GIF8[79]a": "a GIF picture",
    rb"RIFF....WEBP": "a WebP picture",
    rb"BM....\0\0\0\0": "a BMP picture",
    rb"II\*\0|MM\0\*": "a TIFF picture",
    rb"\0\0..ftyp(hei[cx]|hevc|mif1|msf1|avi[fs])": "a HEIC or AVIF picture",
    rb"\0\0..ftyp|\x1a\x45\xdf\xa3|RIFF....AVI ": "a video",
    rb"PK\x03\x04.{26}[^/\0]+/(data\.pkl|\.data/|\.format_version|byteorder)": "a file of torch.save",
    rb"PK\x03\x04.{26}[^\0]{1,200}\.npy": "a .npz file of numpy",
    rb"PK(\x03\x04|\x05\x06|\x07\x08)": "a zip archive",
    rb"\x1f\x8b": "a gzip file",
    rb"BZh[1-9]1AY|\xfd7zXZ\0|\x28\xb5\x2f\xfd": "a compressed file (bzip2, xz or zstd)",
    rb"7z\xbc\xaf\x27\x1c|Rar!\x1a\x07": "a 7z or RAR archive",
    rb".{257}ustar": "a tar archive",
    rb"\x0a\x23\xd7\xce": "a .rec file of RecordIO",
    rb"\x93NUMPY": "a .npy file of numpy",
    rb"PAR1[\0-\x1f]": "a Parquet file",
    rb"ARROW1\0|\xff\xff\xff\xff..\0\0": "an Arrow file",
    rb"\x89HDF\r\n\x1a\n": "an HDF5 file",
    rb"SQLite format 3\0": "an SQLite database",
    rb".{16}\xde\xc0\xef\xbe": LMDB,
    rb".{5}\0\0\0\{": "a safetensors file",
    rb"\x12\x01\0{6}": "a .params file of MXNet",
    rb"\x80[\x02-\x05][\x95(\]}cKX\x8a\x8c]": "a pickle",
    rb"\x08[\x01-\x0f][\x12\x1a\x22*2:]": "an ONNX model",
    rb"%PDF-\d": "a PDF",
    rb"\xff\xfe|\xfe\xff": "text in UTF-16; write it in UTF-8",
    rb"version https://git-lfs": "a pointer of Git LFS; `git lfs pull` brings the file itself",
    rb"(\xef\xbb\xbf)?\s*<(?i:!doctype html|html|head)": "an HTML page, as a server's login or error",
    rb"(\xef\xbb\xbf)?\s*<(?i:\?xml|error)": "XML, as a server's error",
    rb"\x0e\0{3}.{4}!!META_NET_DEF": "a .mdl file of Caffe2",
    rb"[\1-\xff][\0\1]\0\0.{3}[\0-\x7f][!-~]{8}": "a minidb file of Caffe2, whose convert_db makes an LMDB of it",
    rb"\0+\Z": "zeros; its writing or copying has not ended",
}
_PATTERNS = [(re.compile(pattern, re.DOTALL), kind) for pattern, kind in _KINDS.items()]


def kind_of(head: bytes) -> str:
    """Returns the kind of a file that starts with these bytes (HEAD_BYTES of them suffice) as a noun with its article,
    perhaps with a remedy: "a PNG picture"; "empty"; TEXT; "" for none of these. Trusts nothing but the bytes."""
    if not head:
        return "empty"
    if kind := next((kind for pattern, kind in _PATTERNS if pattern.match(head)), ""):
        return kind
    return "" if re.search(rb"[\0-\x08\x0e-\x1a\x1c-\x1f]", head) else TEXT


def kind_of_file(path: str | os.PathLike[str]) -> str:
    """Returns `kind_of` a file; "" if it cannot be read."""
    try:
        with open(path, "rb", opener=regular) as file:
            return kind_of(file.read(HEAD_BYTES))
    except OSError:
        return ""


def it_is(content: bytes | str | os.PathLike[str]) -> str:
    """Returns the end of a message about a file, or its first bytes, that a reader cannot use: "; it is a PDF"; "" for
    text and unknown kinds."""
    kind = kind_of(content[:HEAD_BYTES]) if isinstance(content, bytes) else kind_of_file(content)
    return f"; it is {kind}" if kind and kind != TEXT else ""
