"""The report's CSS: light and dark, as the reader's system is set."""

# Colours that are told apart on both grounds, and by most who are colour-blind (Okabe and Ito, 2008; yellow left out).
_LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#8c564b")
_DARK = ("#4ba3d9", "#f08a4b", "#2fbf95", "#dd9cc0", "#56b4e9", "#e69f00", "#a6a6a6", "#c08b80")
NUM_COLOURS = len(_LIGHT)


def _colours(values: tuple[str, ...]) -> str:
    return "; ".join(f"--c{number}: {value}" for number, value in enumerate(values))


_PAINT = "\n".join(
    f".c{n} {{ fill: var(--c{n}); stroke: var(--c{n}); background: var(--c{n}) }}" for n in range(NUM_COLOURS)
)
STYLE = f"""
:root {{ {_colours(_LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_colours(_DARK)} }} }}
{_PAINT}
polyline[class] {{ fill: none }}
"""
STYLE += """
:root { --ground: #fff; --card: #f4f5f7; --text: #1c2330; --soft: #667085; --line: #dfe3e8; color-scheme: light dark }
@media (prefers-color-scheme: dark) { :root { --ground: #14171c; --card: #1f242c; --text: #e4e8ee; --soft: #98a2b3;
  --line: #333b47 } }
body { background: var(--ground); color: var(--text); font: 15px/1.5 system-ui, sans-serif; max-width: 860px;
  margin: 2rem auto; padding: 0 1rem }
h1 { margin: 0; font-size: 1.7rem; overflow-wrap: anywhere } h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem;
  border-bottom: 1px solid var(--line) } h3 { font-size: 1rem; margin: 1.2rem 0 .4rem }
nav { display: flex; flex-wrap: wrap; gap: 0 1rem } nav a { color: var(--c0) }
.axis { margin: .8rem 0 0; color: var(--soft); font-size: .85rem }
.small { color: var(--soft); font-size: .85rem }
.cards { display: flex; flex-wrap: wrap; gap: .7rem }
.cards div { background: var(--card); border-radius: .5rem; padding: .6rem 1rem }
.cards b { display: block; font-size: 1.3rem } .cards span { color: var(--soft); font-size: .85rem }
table { border-collapse: collapse; font-size: .9rem } th { text-align: left; color: var(--soft); font-weight: normal }
td, th { padding: .15rem 1.2rem .15rem 0; border-bottom: 1px solid var(--line); overflow-wrap: anywhere;
  vertical-align: top }
svg { width: 100%; height: auto; display: block } svg text { font-size: 12px; fill: var(--soft) }
@media (max-width: 600px) { svg text { font-size: 24px } }
svg.bar { height: 28px } .grid { stroke: var(--line) } .band { fill: var(--c0); opacity: .2 }
polyline { stroke-width: 1.8 }
svg.bar rect { stroke: none }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; font-size: .85rem }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em }
figure { margin: 0 0 1rem } figure img { max-width: 100%; border-radius: .3rem }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(84px, 1fr)); gap: .5rem }
.tiles figure { margin: 0 } .tiles img { width: 100%; image-rendering: pixelated }
.tiles figcaption { font-size: .75rem; color: var(--soft); overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap }
pre { background: var(--card); padding: .7rem 1rem; border-radius: .4rem; overflow-x: auto; font-size: .85rem }
summary { cursor: pointer; color: var(--soft); margin: .5rem 0 } li { overflow-wrap: anywhere; font-size: .9rem }
"""
