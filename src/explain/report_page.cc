#include "explain/report_page.h"

namespace minference::explain {

// Nothing is loaded from anywhere: pictures are data URIs, fonts are the reader's own.
const char* const kReportPage = R"HTML(<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="minference @version@">
<title>@model@: attention report</title>
<style>
:root { --ink: #1d2430; --soft: #5a6472; --line: #dde1e7; --paper: #ffffff; --ground: #f5f6f8; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 20px; margin: 0 0 6px; }
h3 { font-size: 16px; margin: 0; }
p { margin: 0 0 10px; max-width: 76em; }
.soft { color: var(--soft); }
section, article { background: var(--paper); border: 1px solid var(--line); border-radius: 10px;
  padding: 20px 22px; margin-top: 18px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px;
  margin-top: 16px; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; }
.card b { display: block; font-size: 24px; line-height: 1.3; }
.card span { color: var(--soft); font-size: 13px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 18px 4px 0; vertical-align: top; }
th { color: var(--soft); font-weight: 600; font-size: 13px; border-bottom: 1px solid var(--line); }
td.n, th.n { text-align: right; white-space: nowrap; }
.dot { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 8px;
  vertical-align: -1px; border: 1px solid rgba(0, 0, 0, .15); }
.bar { display: flex; height: 34px; border-radius: 6px; overflow: hidden; margin: 12px 0 14px; }
.bar i { font-style: normal; font-size: 13px; line-height: 34px; text-align: center; color: #fff;
  white-space: nowrap; overflow: hidden; text-overflow: ellipsis; border-right: 1px solid #fff; }
.maps { display: flex; flex-wrap: wrap; gap: 28px 44px; margin-top: 14px; }
.maps > div { max-width: 100%; overflow-x: auto; }
.maps h3 { margin-bottom: 2px; }
.maps .how { font-size: 13px; color: var(--soft); max-width: 330px; min-height: 6.1em; margin: 0 0 8px; }
.grid { display: grid; gap: 1px; font-size: 11px; color: var(--soft); margin-top: 8px; }
.grid i, .grid a { display: block; border-radius: 2px; }
.grid i:hover, .grid a:hover { outline: 2px solid var(--ink); }
.grid a { outline: 1.5px solid var(--ink); outline-offset: -1px; }
.grid .y { text-align: right; padding-right: 6px; line-height: var(--h); }
.grid .x { text-align: center; }
/* Maps side by side begin at the same height. */
.legend { min-height: 32px; }
.axis { font-size: 12px; color: var(--soft); }
.scale { width: 300px; max-width: 100%; }
.scale div { height: 12px; border-radius: 3px; border: 1px solid var(--line); }
.ticks { position: relative; height: 18px; font-size: 12px; color: var(--soft); }
.ticks span { position: absolute; transform: translateX(-50%); white-space: nowrap; }
.ticks span.first { transform: none; }
.ticks span.last { transform: translateX(-100%); }
.kinds { font-size: 13px; }
.kinds span { margin-right: 14px; white-space: nowrap; }
.tag { display: inline-block; border-radius: 10px; padding: 1px 10px; margin-left: 8px; font-size: 13px;
  font-weight: 400; color: #fff; }
.plots { display: flex; flex-wrap: wrap; gap: 20px 12px; margin-top: 10px; }
figure { margin: 0; flex: 1 1 340px; max-width: 570px; }
figcaption { font-weight: 600; margin-bottom: 4px; padding-left: 66px; }
.plot { display: grid; grid-template-columns: 66px minmax(0, 1fr); grid-template-rows: auto 20px auto; }
.plot img { display: block; width: 100%; aspect-ratio: 1;
  border: 1px solid var(--line); }
.ylabels { position: relative; font-size: 12px; color: var(--soft); }
.ylabels span { position: absolute; right: 8px; transform: translateY(-50%); }
.ylabels span.first { transform: none; }
.ylabels em { position: absolute; left: 0; top: 50%; transform: translate(-50%, -50%) rotate(-90deg);
  margin-left: 8px; font-style: normal; white-space: nowrap; }
.plot .ticks { grid-column: 2; margin-top: 2px; }
.plot .axis { grid-column: 2; text-align: center; }
details summary { cursor: pointer; color: var(--soft); }
footer { color: var(--soft); font-size: 13px; margin-top: 20px; }
@media print { body { background: #fff; } section, article { break-inside: avoid; } }
</style>
</head>
<body>
<main>
<h1>Where attention went</h1>
<p class="soft">@model@ reading @prompt@ (@tokens@ tokens) with attention method <b>@method@</b>@options@@segments@.
@threads@, kernels @isa@, guard @guard@.</p>
<div class="cards">
<div class="card"><b>@ttft@</b><span>time to first token (TTFT)</span></div>
<div class="card"><b>@kept@</b><span>kept fraction: the share of all query-key pairs that was computed</span></div>
<div class="card"><b>@recall@</b><span>mean recall: the share of the attention mass that lies on them</span></div>
<div class="card"><b>@worst@</b><span>lowest recall of a head (@worst_head@)</span></div>
</div>
<section>
<h2>Time to first token</h2>
<p class="soft">How the @ttft@ between giving the prompt and the first token of the answer were spent.@before@</p>
<div class="bar">@stage_bar@</div>
<table><tr><th>stage</th><th class="n">seconds</th><th class="n">share</th><th>what it is</th></tr>
@stage_rows@</table>
@notes@</section>
<section>
<h2>Every head</h2>
<p class="soft">This model has @layers@ layers of @heads@ attention heads; each head decides on its own which earlier
tokens (keys) a token (query) looks at. One square is one head: layer 0 reads the prompt first, at the
top. Point at a square for its figures; outlined ones are shown in detail below.</p>
<div class="maps">@head_maps@</div>
<details style="margin-top: 16px"><summary>Table of layers</summary>
<table style="margin-top: 8px"><tr><th class="n">layer</th><th class="n">kept</th><th class="n">recall</th>
<th class="n">lowest recall</th><th>head</th></tr>
@layer_rows@</table></details>
</section>
@shown@
<footer>Recall is measured on @guard_rows@ query rows of each prefill step, with exact attention; the mean over
heads and steps is given. Maps are of @map_size@: kept shares count every row, attention is exact on up to
@sampled@ rows of each row of cells. Explaining took no part in the times. minference @version@.</footer>
</main>
</body>
</html>
)HTML";

const char* const kReportHeads = R"HTML(<section>
<h2>Heads in detail</h2>
<p class="soft">Each picture has a row for every query and a column for every key, the beginning of the prompt
at the top and at the left; the grey triangle is the future, which no token sees. A vertical line is a token that
everybody looks at, a diagonal is a fixed distance back. Methods that estimate choose keys anew for each
step of @step@ tokens.</p>
<div class="maps">
<div><h3>Attention, lost</h3><p class="how">Attention: where the head looks when nothing is left out. Lost: the part
of it that lies on keys which were not computed; the paler, the better.</p>@mass_legend@
<div class="axis">share of a query's attention in one cell</div></div>
<div><h3>Kept</h3><p class="how">Which keys the method computed. Every dark place of the left picture should have
colour here.</p>@kept_legend@<div class="axis">share of a cell's query-key pairs that was computed</div></div>
</div>
</section>
)HTML";

}  // namespace minference::explain
