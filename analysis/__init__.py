"""From runs to the figures, tables and statements of a paper."""
