"""Studies on glyphs: many short runs with seeds, their results kept, and their statistics."""
