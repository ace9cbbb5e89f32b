"""Questions about pictures in the form of MMMU (arXiv 2311.16502), from a JSONL file and pictures beside it."""

import ast
import hashlib
import json
import pathlib
import re
from typing import NamedTuple

import numpy as np

from lns_jax.data.pictures import Processor
from lns_jax.data.tokenizers import Tokenizer
from lns_jax.errors import UserError

LETTERS = 'ABCDEFGHIJ'
LAYOUT = '{"question": "What is <image 1>?", "options": ["a cat", "a dog"], "answer": "B", "images": ["cat.png"]}'
PLACE = re.compile(r'<image (\d+)>')
SYSTEM = 'You are a helpful assistant.'
REQUEST = "Answer with the option's letter from the given choices directly."


class Item(NamedTuple):
  """A question. place: file and line. answer: position of the right option. pictures: of <image 1>, <image 2>, ..."""

  place: str
  question: str
  options: list[str]
  answer: int
  pictures: list[pathlib.Path]


class Items(NamedTuple):
  """The questions of a file. skipped: open ones, which have no options. hash: sha256 (hex) of the file."""

  items: list[Item]
  skipped: int
  hash: str

  @property
  def chance(self) -> float:
    """Share of right answers by guessing."""
    return float(np.mean([1 / len(item.options) for item in self.items]))


class Prompt(NamedTuple):
  """An item as a model reads it: tokens [T], patches and grids of its pictures, and the tokens of the letters."""

  tokens: np.ndarray
  patches: np.ndarray
  grid_thw: np.ndarray
  letters: np.ndarray
  answer: int


class Ids(NamedTuple):
  """Tokens around and for the cells of a picture."""

  start: int
  cell: int
  end: int


def read(path) -> Items:
  """Reads a file with one question a line, as `LAYOUT` shows.

  'options' may be text that spells a list, as on Hugging Face; 'images' are paths relative to the file, and `<image n>`
  in the question or an option stands for the n-th; pictures that none stands for come before the question. Lines with
  "question_type": "open" are skipped.

  Raises:
    UserError: the file cannot be read, holds no question with options, a line is malformed, or a picture is not there.
  """
  path = pathlib.Path(path).expanduser()
  try:
    raw = path.read_bytes()
    lines = raw.decode('utf-8').splitlines()
  except OSError as e:
    raise UserError(f'{path} cannot be read: {e.strerror or e}.') from None
  except UnicodeDecodeError:
    raise UserError(f'{path} is not UTF-8 text.') from None
  found = [_item(path, n, line) for n, line in enumerate(lines, 1) if line.strip()]
  items = [item for item in found if item is not None]
  if not items:
    raise UserError(f'{path} holds no question with options; a line is {LAYOUT}.')
  return Items(items, len(found) - len(items), hashlib.sha256(raw).hexdigest())


def _item(path: pathlib.Path, number: int, line: str) -> Item | None:
  place = f'{path}, line {number}'
  def malformed(why: str) -> UserError:
    return UserError(f'{place}: {why}; a line is {LAYOUT}.')
  try:
    values = json.loads(line)
  except ValueError:
    raise malformed('this is not JSON') from None
  if not isinstance(values, dict) or not isinstance(values.get('question'), str):
    raise malformed('there is no question')
  if values.get('question_type') == 'open':
    return None
  options, images = values.get('options'), values.get('images', [])
  if isinstance(options, str):
    try:
      options = ast.literal_eval(options)
    except (ValueError, SyntaxError):
      raise malformed('options are no list') from None
  if not isinstance(options, list) or not 2 <= len(options) <= len(LETTERS):
    raise malformed(f'options must be a list of 2 to {len(LETTERS)}')
  images = [images] if isinstance(images, str) else images
  if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
    raise malformed('images must be a list of paths')
  answer = values.get('answer')
  if not isinstance(answer, str) or answer not in LETTERS[:len(options)] or len(answer) != 1:
    raise malformed(f'answer = {answer!r} must be one of {", ".join(LETTERS[:len(options)])}')
  options, pictures = list(map(str, options)), [path.parent / image for image in images]
  for named in map(int, PLACE.findall(' '.join([values['question'], *options]))):
    if not 1 <= named <= len(pictures):
      raise malformed(f'<image {named}> stands for none of its {len(pictures)} images')
  for picture in pictures:
    if not picture.is_file():
      raise UserError(f'{place}: there is no picture at {picture}.')
  return Item(place, values['question'], options, LETTERS.index(answer), pictures)


def text(item: Item) -> str:
  """Question, options by letter, and what is asked for; `<image n>` where pictures are."""
  asked = item.question + ''.join(f'\n{letter}. {option}' for letter, option in zip(LETTERS, item.options))
  named = set(map(int, PLACE.findall(asked)))
  before = ''.join(f'<image {n}>' for n in range(1, len(item.pictures) + 1) if n not in named)
  return f'{before}{asked}\n{REQUEST}'


def prompt(item: Item, tokenizer: Tokenizer, processor: Processor, ids: Ids) -> Prompt:
  """An item as tokens and patches.

  A tokenizer that knows <|im_start|> and <|im_end|> gets the chat form of Qwen's instructed models, whose answer starts
  with the letter; another one the plain text and 'Answer:', after which a space and the letter follow.

  Raises UserError when a letter is not one token, or a picture cannot be read.
  """
  begin, end = (tokenizer.encode(mark, special=True).tolist() for mark in ('<|im_start|>', '<|im_end|>'))
  if len(begin) != 1 or len(end) != 1:
    parts = [f'{text(item)}\nAnswer:']
  else:
    parts = [*begin, f'system\n{SYSTEM}', *end, '\n', *begin, f'user\n{text(item)}', *end, '\n', *begin, 'assistant\n']
  tokens, patches, grids = [], [], []
  made = [processor.patches(picture) for picture in item.pictures]
  for part in parts:
    if isinstance(part, int):
      tokens.append(part)
      continue
    pieces = PLACE.split(part)  # text, number, text, ..., text
    for n, piece in enumerate(pieces):
      if n % 2:
        of_picture, grid = made[int(piece) - 1]
        cells = len(of_picture) // processor.merge ** 2
        tokens += [ids.start, *[ids.cell] * cells, ids.end]
        patches.append(of_picture)
        grids.append(grid)
      elif piece:
        tokens += tokenizer.encode(piece).tolist()
  letters = _letters(tokenizer, '' if isinstance(parts[0], int) else ' ', len(item.options))
  none = np.zeros((0, 3 * processor.frames * processor.patch_size ** 2), np.float32)
  return Prompt(np.array(tokens, np.int32), np.concatenate([none, *patches]), np.array(grids, int).reshape(-1, 3),
                letters, item.answer)


def _letters(tokenizer: Tokenizer, before: str, K: int) -> np.ndarray:
  """The tokens [K] of the first letters; without a space where a letter behind one is no single token."""
  for begin in dict.fromkeys((before, '')):
    encoded = tokenizer.encode_batch([begin + letter for letter in LETTERS[:K]])
    if all(len(tokens) == 1 for tokens in encoded):
      return np.concatenate(encoded)
  raise UserError(f'the tokenizer {tokenizer.name} has no single token for each of the letters A to {LETTERS[K - 1]}.')
