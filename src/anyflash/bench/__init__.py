"""Measurements: `cases` says what, `peers` against what, `check` whether it is right, `timing` and
`memory` how much; `suite` does it all for a case, `report` keeps it and `render` shows it."""
