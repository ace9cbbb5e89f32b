"""A text set prepared by TFDS: `tfds:NAME` with data_dir, or its folder. TensorFlow is not needed."""

import pathlib

from lns_jax.data import found, readers
from lns_jax.data.found import Found
from lns_jax.data.readers import Slice
from lns_jax.errors import UserError


def find(name: str, data_dir: str) -> Found:
  """Looks at the set `name` (such as 'c4/en' or 'c4/en:3.1.0') below `data_dir` (empty: TFDS's default).

  Raises:
    UserError: if it is not prepared there, or in a format that is neither array_record nor TFRecord.
  """
  import tensorflow_datasets as tfds
  try:
    builder = tfds.builder(name, data_dir=data_dir or None)
  except Exception as error:  # unknown names, versions, configurations: each another class
    reason = (str(error).strip().splitlines() or [''])[0].rstrip('.')
    raise UserError(f'TFDS does not know {name!r} in data_dir {data_dir!r}: {reason}.') from None
  return _of_builder(builder, name.split(':')[0].replace('/', '-'))


def find_folder(folder: pathlib.Path) -> Found:
  """Looks at the folder of a prepared set, the one that holds features.json."""
  import tensorflow_datasets as tfds
  builder = tfds.builder_from_directory(folder)
  return _of_builder(builder, builder.name)


def _of_builder(builder, name: str) -> Found:
  folder = pathlib.Path(builder.data_path)
  infos = {s: i for s, i in builder.info.splits.items() if i.num_examples}
  if not infos:
    raise UserError(f'TFDS set {name} is not prepared in {folder}; prepare it there with '
                    f"file_format='array_record', or set data.data_dir to where it is.")
  splits = found.splits_of(infos)
  slices = []
  for split, info in infos.items():
    if splits is None or splits[split]:
      slices.extend(((splits or {}).get(split, ''), s) for s in _slices(builder, name, split, info))
  unused = () if splits is None else tuple(f'split {s}' for s in infos if not splits[s])
  files = tuple((f.name, f) for f in sorted(folder.iterdir()) if f.is_file())
  return Found(name, tuple(slices), files, 'named splits' if splits else '', unused)


def _slices(builder, name: str, split: str, info) -> list[Slice]:
  """Ranges of records of about a part's size, or whole files where only those can be read."""
  form = builder.info.file_format.file_suffix
  folder = str(builder.data_path)
  if form == 'tfrecord':
    return [Slice('tfrecord', str(path), f'{name}:{split}:{i}', size=pathlib.Path(path).stat().st_size)
            for i, path in enumerate(info.filepaths)]
  if form != 'array_record':
    raise UserError(f'TFDS set {name} is prepared as {form}; array_record and tfrecord can be read.')
  count = info.num_examples
  step = max(1, round(count * found.PART_BYTES / max(info.num_bytes, 1)))
  return [Slice('tfds', folder, f'{name}:{split}', s, min(s + step, count),
                int(info.num_bytes * (min(s + step, count) - s) / count)) for s in range(0, count, step)]
