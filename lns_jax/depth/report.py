"""placeholder until the report lands."""

def write(path, summary, histories):
  path.write_text("<html></html>")
