"""Pieces of a self-contained HTML page: no script, no request, readable on a desk, a telephone and in the dark."""

import html
from collections.abc import Sequence

_CSS = """
:root{--ink:#1f2429;--soft:#56606b;--page:#fff;--box:#f4f6f8;--line:#d6dbe1;--faint:#d9dde2;--card:#fff}
@media (prefers-color-scheme:dark){
:root{--ink:#e7eaee;--soft:#a4aeb9;--page:#14181d;--box:#1d232a;--line:#37404a;--card:#f1f3f5}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1060px;margin:0 auto;padding:24px 16px 48px;overflow-wrap:anywhere}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 12px}h2{font-size:1.2rem;margin:44px 0 8px}
p{margin:0 0 10px;max-width:74ch}.lead{font-size:1.1rem}.how{color:var(--soft)}
ul.facts{margin:0 0 20px;padding-left:1.2em;max-width:74ch}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,430px),1fr));gap:12px;margin-top:14px}
figure{margin:0;padding:10px;border:1px solid var(--line);border-radius:8px;background:var(--card);color:#1f2429}
figure.alone{grid-column:1/-1}
figure svg{display:block;width:100%;max-width:480px;height:auto;margin:0 auto}
.scroll{overflow-x:auto;margin:14px 0;border:1px solid var(--line);border-radius:8px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;overflow-wrap:normal}
th,td{padding:6px 12px;text-align:right;white-space:nowrap;border-top:1px solid var(--line)}
thead th{border-top:0;background:var(--box)}
tr>:first-child{position:sticky;left:0;background:var(--page);text-align:left;font-weight:500;
white-space:normal;min-width:15em}thead tr>:first-child{background:var(--box)}
@media (max-width:600px){th,td{padding:6px 8px;white-space:normal}table{font-size:14px}
tr>:first-child{min-width:0;width:42%}}
pre{margin:0;padding:12px;font:13px/1.5 ui-monospace,monospace;overflow-wrap:normal}
summary{cursor:pointer;margin:14px 0 0}footer{margin-top:48px;border-top:1px solid var(--line)}
"""


def text(value) -> str:
  """Any value as text that cannot be taken for markup."""
  return html.escape(str(value))


def paragraph(words: str, kind: str = '') -> str:
  """Plain text -> <p>."""
  return f'<p class="{kind}">{text(words)}</p>' if kind else f'<p>{text(words)}</p>'


def facts(sentences: Sequence[str]) -> str:
  """A list of sentences; nothing where there are none."""
  items = ''.join(f'<li>{text(s)}</li>' for s in sentences)
  return f'<ul class="facts">{items}</ul>' if items else ''


def _scrolling(inner: str, label: str) -> str:
  # Focusable, so that it scrolls from a keyboard too.
  return f'<div class="scroll" role="region" aria-label="{text(label)}" tabindex="0">{inner}</div>'


def table(label: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A table that scrolls inside its own box; the first column names the rows."""
  head = ''.join(f'<th scope="col">{text(h)}</th>' for h in header)
  body = ''.join(f'<tr><th scope="row">{text(r[0])}</th>' + ''.join(f'<td>{text(c)}</td>' for c in r[1:]) + '</tr>'
                 for r in rows)
  return _scrolling(f'<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>', label)


def code(label: str, lines: str) -> str:
  """Preformatted lines that scroll inside their own box."""
  return _scrolling(f'<pre>{text(lines)}</pre>', label)


def details(label: str, inner: str) -> str:
  """Something to open."""
  return f'<details><summary>{text(label)}</summary>{inner}</details>'


def section(title: str, how: str, found: Sequence[str], pictures: Sequence[tuple[str, bool]]) -> str:
  """How to read some pictures, what was found here, and the pictures: SVG elements, and whether one stands alone."""
  kind = lambda alone: ' class="alone"' if alone else ''
  shown = ''.join(f'<figure{kind(alone)}>{p}</figure>' for p, alone in pictures)
  return (f'<section><h2>{text(title)}</h2>{paragraph(how, "how")}{"".join(map(paragraph, found))}'
          f'<div class="figures">{shown}</div></section>')


def page(title: str, body: str) -> str:
  """The whole document."""
  return ('<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
          '<meta name="viewport" content="width=device-width, initial-scale=1">'
          '<meta name="color-scheme" content="light dark">'
          '<link rel="icon" href="data:,">'  # or a browser asks for /favicon.ico
          f'<title>{text(title)}</title><style>{_CSS}</style></head><body><main>{body}</main></body></html>\n')
