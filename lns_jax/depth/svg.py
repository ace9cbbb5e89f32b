"""A matplotlib figure as an <svg> element of a page."""

import html
import io
import re

import matplotlib
from matplotlib.figure import Figure

from lns_jax.depth.plots import FAINT, INK

_SHORTER = (  # less than half the bytes, the same picture
    (r'<g id="[^"]*"', '<g'),  # nothing refers to groups, and their names would repeat in a page
    (r' transform="rotate\(-0 [^"]*"', ''),
    (r"'DejaVu Sans'[^;\"]*", 'system-ui, sans-serif'),
    (r'\s*\n\s*', '\n'),
    (r'\n([LzQC])\b', r'\1'),
    (r'(?<= [dxy]=")[^"]*', lambda m: re.sub(r'(\.\d)\d+', r'\1', m[0])),  # to a tenth of a point
    (r'<g/>\n', ''),
    *[(r'<g>\n(<(?:path|use)[^>]*/>)\n</g>', r'\1')] * 2,
)


def element(figure: Figure, label: str) -> str:
  """The figure as an <svg> element: text as text in the page's colours, and `label` for those who cannot see it."""
  sink = io.StringIO()
  with matplotlib.rc_context({'svg.fonttype': 'none', 'svg.hashsalt': label}):
    figure.savefig(sink, format='svg', transparent=True, metadata={'Date': None})
  text = sink.getvalue()
  text = text[text.index('<svg'):]
  text = re.sub(r'<metadata>.*?</metadata>', '', text, flags=re.S)
  text = re.sub(r'<svg[^>]*viewBox="([^"]*)"[^>]*>',
                lambda m: f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{m[1]}" role="img" '
                          f'aria-label="{html.escape(label)}">', text, count=1)
  for pattern, short in _SHORTER:
    text = re.sub(pattern, short, text)
  return text.replace(INK, 'currentColor').replace(FAINT, f'var(--faint,{FAINT})')
