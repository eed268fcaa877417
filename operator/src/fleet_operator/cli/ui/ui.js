"use strict";
// Everything that comes from a job is written as text, never as HTML.

const POLL_MS = 1000;
const LOG_CHARS = 400000; // of a log on the page; the file has the rest
const COLOURS = 8;
const SVG = "http://www.w3.org/2000/svg";
const FINAL = ["Succeeded", "Failed", "Stopped", "Lost"];

const $ = (id) => document.getElementById(id);
const state = {
  jobs: [], shown: null, compared: new Set(), details: new Map(), charts: new Map(), clock: 0,
  answered: null, // when fleetjob ui answered last
  cluster: null, // its name, and when it answered last
};

function element(tag, text, ...classes) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  made.classList.add(...classes.filter(Boolean));
  return made;
}

function drawn(parent, tag, attributes, ...classes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.classList.add(...classes.filter(Boolean));
  parent.append(made);
  return made;
}

const number = (value) => (value === null || value === undefined ? "-" : String(Number(value.toPrecision(6))));
const stateClass = (word) => (/^\w+$/.test(word) ? word : "");

function duration(seconds) {
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["m", 60]]) {
    if (seconds >= 2 * size) return `${Math.floor(seconds / size)}${unit}`;
  }
  return `${Math.max(0, Math.floor(seconds))}s`;
}

function bytes(count) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (count >= size) return `${(count / size).toFixed(1)} ${unit}`;
  }
  return `${count} B`;
}

/** Return a moment with its date, where that is not today's. */
function moment(stamp) {
  const [day, today] = [new Date(stamp), new Date()].map((each) => each.toLocaleDateString());
  return day === today ? clockTime(stamp) : `${day} ${clockTime(stamp)}`;
}

function clockTime(stamp) {
  const moment = new Date(stamp);
  return isNaN(moment) ? "" : moment.toLocaleTimeString([], { hour12: false });
}

async function ask(path, query = {}) {
  const response = await fetch(`${path}?${new URLSearchParams(query)}`, { cache: "no-store" });
  if (response.ok) return response.json();
  const text = await response.text();
  let told = text.trim();
  try { told = JSON.parse(text).error; } catch { /* not JSON: a plain refusal */ }
  const error = new Error(told);
  error.status = response.status;
  throw error;
}

// --- what the address remembers: the shown job and the compared ones

function readAddress() {
  const parts = new URLSearchParams(location.hash.slice(1));
  state.shown = parts.get("job") || state.shown;
  state.compared = new Set((parts.get("compare") || "").split(",").filter(Boolean));
}

function writeAddress() {
  const parts = new URLSearchParams();
  if (state.shown) parts.set("job", state.shown);
  if (state.compared.size) parts.set("compare", [...state.compared].join(","));
  history.replaceState(null, "", `${location.pathname}#${parts}`);
}

function show(id) {
  if (id !== state.shown) {
    state.shown = id;
    log.restart();
    $("replica").replaceChildren();
  }
  writeAddress();
  again();
}

// --- the table of jobs

function rows(body, items, fill) {
  const old = [...body.rows];
  items.forEach((item, at) => {
    const row = old[at] || body.insertRow();
    fill(row, item);
  });
  old.slice(items.length).forEach((row) => row.remove());
}

/** Set the texts of a row's cells; a cell that has not changed is left alone, so that it can be selected. */
function cells(row, texts) {
  texts.forEach((text, at) => {
    const cell = row.cells[at] || row.insertCell();
    const [words, name] = Array.isArray(text) ? text : [text, ""];
    const told = words === null || words === undefined ? "-" : String(words);
    if (cell.textContent !== told) cell.textContent = told;
    if (cell.className !== name) cell.className = name;
  });
}

function fillJob(row, job) {
  if (row.dataset.id !== job.id) {
    row.replaceChildren();
    row.dataset.id = job.id;
    const box = element("input");
    box.type = "checkbox";
    box.setAttribute("aria-label", `compare ${job.label}`);
    box.addEventListener("change", () => {
      if (box.checked) state.compared.add(job.id);
      else state.compared.delete(job.id);
      writeAddress();
      again();
    });
    row.insertCell().append(box);
    const link = element("button", job.label, "link");
    link.addEventListener("click", () => show(job.id));
    row.insertCell().append(link);
    for (let at = 0; at < 8; at += 1) row.insertCell();
    row.cells[4].append(element("progress"), element("span"));
    row.cells[9].className = "words";
  }
  row.className = job.id === state.shown ? "shown" : "";
  row.cells[0].firstChild.checked = state.compared.has(job.id);
  const put = (at, text, name) => {
    const told = text === null || text === undefined ? "-" : String(text);
    if (row.cells[at].textContent !== told) row.cells[at].textContent = told;
    if (name !== undefined) row.cells[at].className = name;
  };
  put(2, job.place === "machine" ? "this machine" : `namespace ${job.namespace}`);
  put(3, job.state, stateClass(job.state));
  const [bar, told] = row.cells[4].children;
  bar.hidden = job.percentage === null;
  bar.max = 100;
  bar.value = job.percentage ?? 0;
  told.textContent = job.step === null ? "-" : ` ${job.step}${job.total_steps ? `/${job.total_steps}` : ""}`;
  put(5, number(job.loss));
  put(6, job.eta_seconds === null ? "-" : duration(job.eta_seconds));
  put(7, job.restarts);
  put(8, job.started ? `${duration((state.clock - new Date(job.started)) / 1000)} ago` : "-");
  put(9, job.sentence);
}

function drawJobs(answer) {
  state.clock = state.answered = new Date(answer.now);
  const cluster = answer.cluster;
  const stale = cluster && cluster.error && state.cluster; // its last rows stay
  state.jobs = [...answer.jobs, ...(stale ? state.jobs.filter((job) => job.place === "cluster") : [])];
  if (cluster && !cluster.error) state.cluster = { name: cluster.name, answered: state.clock };
  $("none").hidden = state.jobs.length > 0;
  rows($("jobs").tBodies[0], state.jobs, fillJob);
  document.querySelectorAll("#jobs tbody tr").forEach((row, at) => row.classList.toggle("stale", Boolean(stale) && state.jobs[at].place === "cluster"));
  if (!cluster) $("where").textContent = "this machine";
  else if (!cluster.error) $("where").textContent = `this machine; ${cluster.name}`;
  else if (stale) $("where").textContent = `this machine; ${state.cluster.name}, as it was at ${moment(state.cluster.answered)}: ${cluster.error}`;
  else $("where").textContent = `this machine; no cluster: ${cluster.error}`;
}

// --- curves

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

class Chart {
  constructor(parent, metric) {
    this.curves = [];
    this.view = null; // the steps that are zoomed in on
    this.figure = element("figure");
    this.figure.dataset.metric = metric;
    const caption = element("figcaption");
    this.whole = element("button", "zoom out", "link");
    this.whole.hidden = true;
    this.whole.addEventListener("click", () => this.zoom(null));
    caption.append(element("span", metric), this.whole);
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("role", "img");
    this.svg.setAttribute("aria-label", `${metric} over steps`);
    this.tip = element("div", null, "tip");
    this.tip.hidden = true;
    this.legend = element("ul", null, "legend");
    this.figure.append(caption, this.svg, this.tip, this.legend);
    parent.append(this.figure);
    this.svg.addEventListener("pointermove", (event) => this.moved(event));
    this.svg.addEventListener("pointerleave", () => this.left());
    this.svg.addEventListener("pointerdown", (event) => { this.from = this.inside(event); });
    this.svg.addEventListener("pointerup", (event) => this.released(event));
    this.svg.addEventListener("dblclick", () => this.zoom(null));
    new ResizeObserver(() => this.draw()).observe(this.figure);
  }

  set(curves) {
    this.curves = curves;
    this.legend.replaceChildren(...curves.map((each) => element("li", `— ${each.label}`, `c${each.colour}`)));
    this.draw();
  }

  zoom(view) {
    this.view = view;
    this.whole.hidden = view === null;
    this.draw();
  }

  draw() {
    const width = this.figure.clientWidth;
    if (!width || !this.curves.length) return;
    const height = 220;
    this.box = { left: 56, right: width - 18, top: 8, bottom: height - 24 };
    const box = this.box;
    const steps = this.curves.flatMap((each) => [each.points[0][0], each.points.at(-1)[0]]);
    const [low, high] = this.view || [Math.min(...steps), Math.max(...steps)];
    [this.low, this.high] = high > low ? [low, high] : [low - 1, high + 1];
    // One point on each side of the view, so that lines reach its edges.
    const seen = this.curves.map(({ points }) => {
      const first = Math.max(0, points.findIndex((each) => each[0] >= this.low) - 1);
      const after = points.findIndex((each) => each[0] > this.high);
      return points.slice(first, after < 0 ? points.length : after + 1);
    });
    let bottom = Infinity;
    let top = -Infinity;
    for (const [, value] of seen.flat()) {
      bottom = Math.min(bottom, value);
      top = Math.max(top, value);
    }
    if (!(top > bottom)) [bottom, top] = [bottom - (Math.abs(bottom) || 1) / 2, bottom + (Math.abs(bottom) || 1) / 2];
    this.x = (step) => box.left + ((step - this.low) / (this.high - this.low)) * (box.right - box.left);
    this.y = (value) => box.bottom - ((value - bottom) / (top - bottom)) * (box.bottom - box.top);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    this.svg.replaceChildren();
    const clip = `clip-${this.figure.dataset.metric.replace(/\W/g, "-")}`;
    const defined = drawn(drawn(this.svg, "defs", {}), "clipPath", { id: clip });
    drawn(defined, "rect", { x: box.left, y: 0, width: Math.max(0, box.right - box.left), height });
    for (const value of ticks(bottom, top, 4)) {
      drawn(this.svg, "line", { x1: box.left, x2: box.right, y1: this.y(value), y2: this.y(value) }, "grid");
      drawn(this.svg, "text", { x: box.left - 6, y: this.y(value) + 4, "text-anchor": "end" }).textContent = number(value);
    }
    for (const step of ticks(this.low, this.high, Math.max(2, Math.floor(width / 90))).filter(Number.isInteger)) {
      drawn(this.svg, "text", { x: this.x(step), y: height - 8, "text-anchor": "middle" }).textContent = number(step);
    }
    seen.forEach((points, at) => {
      const path = points.map(([step, value]) => `${this.x(step).toFixed(1)},${this.y(value).toFixed(1)}`).join("L");
      const colour = `c${this.curves[at].colour}`;
      drawn(this.svg, "path", { d: `M${path}`, "clip-path": `url(#${clip})` }, "curve", colour);
      if (points.length === 1) drawn(this.svg, "circle", { cx: this.x(points[0][0]), cy: this.y(points[0][1]), r: 3 }, "point", colour);
    });
    this.cross = drawn(this.svg, "line", { y1: box.top, y2: box.bottom, visibility: "hidden" }, "cross");
    this.chosen = drawn(this.svg, "rect", { y: box.top, height: box.bottom - box.top, visibility: "hidden" }, "zoom");
  }

  inside(event) {
    const at = event.clientX - this.svg.getBoundingClientRect().left;
    const within = Math.min(this.box.right, Math.max(this.box.left, at));
    return this.low + ((within - this.box.left) / (this.box.right - this.box.left)) * (this.high - this.low);
  }

  moved(event) {
    if (!this.box) return;
    const at = this.inside(event);
    const nearest = this.curves.map(({ points }) => points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a)));
    const step = nearest.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a))[0];
    for (const name of ["x1", "x2"]) this.cross.setAttribute(name, this.x(step));
    this.cross.setAttribute("visibility", "visible");
    const lines = this.curves.map((each, index) => element("div", `${each.label}: ${number(nearest[index][1])}`, `c${each.colour}`));
    this.tip.replaceChildren(element("div", `step ${step}`), ...lines);
    this.tip.hidden = false;
    const left = this.x(step) < this.figure.clientWidth / 2;
    this.tip.style.left = left ? `${this.x(step) + 8}px` : "auto";
    this.tip.style.right = left ? "auto" : `${this.figure.clientWidth - this.x(step) + 8}px`;
    if (this.from !== undefined && event.buttons) {
      const [a, b] = [this.x(this.from), this.x(at)].sort((one, other) => one - other);
      this.chosen.setAttribute("x", a);
      this.chosen.setAttribute("width", b - a);
      this.chosen.setAttribute("visibility", "visible");
    }
  }

  left() {
    this.tip.hidden = true;
    this.cross?.setAttribute("visibility", "hidden");
    this.chosen?.setAttribute("visibility", "hidden");
    this.from = undefined;
  }

  released(event) {
    if (this.from === undefined || !this.box) return;
    const view = [this.from, this.inside(event)].sort((one, other) => one - other);
    this.from = undefined;
    if (this.x(view[1]) - this.x(view[0]) > 8) this.zoom(view);
    else this.chosen.setAttribute("visibility", "hidden");
  }
}

/** Return the jobs whose curves are drawn: the shown one, and those to compare with it. */
function drawnJobs() {
  return [...new Set([state.shown, ...state.compared])].map((id) => state.details.get(id)).filter(Boolean);
}

function drawCurves() {
  const jobs = drawnJobs();
  const metrics = new Map();
  let colour = 0;
  const colours = new Map();
  for (const job of jobs) {
    for (const [metric, curves] of Object.entries(job.series)) {
      for (const [replica, points] of Object.entries(curves)) {
        if (!points.length) continue;
        const label = jobs.length > 1 ? `${job.label} ${replica}` : replica;
        const key = `${job.id} ${replica}`;
        if (!colours.has(key)) colours.set(key, colour++ % COLOURS);
        if (!metrics.has(metric)) metrics.set(metric, []);
        metrics.get(metric).push({ label, points, colour: colours.get(key) });
      }
    }
  }
  $("no-curves").hidden = metrics.size > 0;
  for (const [metric, chart] of state.charts) {
    if (!metrics.has(metric)) {
      chart.figure.remove();
      state.charts.delete(metric);
    }
  }
  const order = [...metrics.keys()].sort((a, b) => (b === "loss") - (a === "loss") || a.localeCompare(b));
  for (const metric of order) {
    if (!state.charts.has(metric)) state.charts.set(metric, new Chart($("charts"), metric));
    state.charts.get(metric).set(metrics.get(metric));
  }
}

function drawComparison() {
  const jobs = drawnJobs();
  $("comparison").hidden = jobs.length < 2;
  if (jobs.length < 2) return;
  const took = (job) => {
    const end = job.ended ? new Date(job.ended) : state.clock;
    return job.started ? duration((end - new Date(job.started)) / 1000) : "-";
  };
  const facts = {
    state: (job) => job.state, mode: (job) => job.mode, took, step: (job) => job.step, loss: (job) => number(job.loss),
    restarts: (job) => job.restarts,
    trainers: (job) => job.replicas.filter((each) => each.name.startsWith("trainer")).length,
    servers: (job) => job.replicas.filter((each) => each.name.startsWith("pserver")).length,
  };
  const named = [...new Set(jobs.flatMap((job) => Object.keys(job.metrics)))].sort();
  const lines = [
    ...Object.entries(facts).map(([name, of]) => [name, ...jobs.map(of)]),
    ...named.map((name) => [name, ...jobs.map((job) => number(job.metrics[name]))]),
  ];
  rows($("compared").tHead, [["", ...jobs.map((job) => job.label)]], cells);
  rows($("compared").tBodies[0], lines, (row, line) => {
    while (row.cells.length > line.length) row.deleteCell(-1);
    cells(row, line);
  });
}

// --- the shown job

function drawTimeline(job) {
  const lives = job.replicas.flatMap((each) => each.lives.filter((life) => life.started).map((life) => ({ ...life, name: each.name })));
  const parent = $("timeline");
  if (!lives.length) {
    parent.replaceChildren(element("p", "No replica has started yet."));
    return;
  }
  const names = [...new Set(lives.map((each) => each.name))];
  const over = FINAL.includes(job.state);
  const ends = lives.map((each) => (each.ended ? +new Date(each.ended) : over && job.ended ? +new Date(job.ended) : +state.clock));
  const first = Math.min(...lives.map((each) => +new Date(each.started)));
  const last = Math.max(...ends, first + 1000);
  const [width, line, label] = [parent.clientWidth || 600, 22, 90];
  const x = (time) => label + ((time - first) / (last - first)) * (width - label - 4);
  const svg = document.createElementNS(SVG, "svg");
  const height = names.length * line + 20;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  names.forEach((name, at) => { drawn(svg, "text", { x: 0, y: at * line + 15 }).textContent = name; });
  lives.forEach((life, at) => {
    const top = names.indexOf(life.name) * line + 3;
    const [from, to] = [x(+new Date(life.started)), x(ends[at])];
    const kind = life.exit_code === 0 ? "good" : life.exit_code === null || life.exit_code === undefined ? "" : "bad";
    const bar = drawn(svg, "rect", { x: from, y: top, width: Math.max(2, to - from - 1), height: line - 6 }, "life", kind);
    const end = life.ended ? `ended ${clockTime(life.ended)}, exit code ${life.exit_code ?? "-"}` : over ? "ended with the job" : "running";
    drawn(bar, "title", {}).textContent = `${life.name}, attempt ${life.attempt}: started ${clockTime(life.started)}, ${end}`;
  });
  const marks = ticks(0, (last - first) / 1000, Math.max(2, Math.floor(width / 140)));
  for (const seconds of marks) {
    drawn(svg, "text", { x: x(first + seconds * 1000), y: height - 4 }).textContent = seconds < 120 ? `${number(seconds)} s` : duration(seconds);
  }
  parent.replaceChildren(svg);
}

function drawDetail(job) {
  $("detail").hidden = false;
  $("name").textContent = job.label;
  $("state").textContent = job.state;
  $("state").className = stateClass(job.state);
  $("sentence").textContent = job.sentence;
  $("folder").textContent = job.folder ? `${job.mode}; logs in ${job.folder}` : job.mode;
  document.title = `${job.name}: ${job.state}`;
  $("curves-note").hidden = !job.curves_note;
  $("curves-note").textContent = job.curves_note || "";
  drawCurves();
  drawComparison();
  rows($("replicas").tBodies[0], job.replicas, (row, each) => {
    const step = each.step === null ? "-" : `${each.step}${each.total_steps ? `/${each.total_steps}` : ""}`;
    const codes = each.exit_codes.length ? each.exit_codes.join(", ") : "-";
    const memory = each.memory_bytes ? bytes(each.memory_bytes) : "-";
    const rate = each.samples_per_second === null ? "-" : number(Math.round(each.samples_per_second));
    cells(row, [each.name, [each.state, stateClass(each.state)], step, number(each.loss), rate, memory, each.restarts, codes, [each.waits_for, "words"]]);
  });
  drawTimeline(job);
  $("conditions-part").hidden = !job.conditions.length;
  rows($("conditions").tBodies[0], job.conditions, (row, each) => {
    cells(row, [each.type, each.status, each.reason, clockTime(each.time), [each.message, "words"]]);
  });
  const told = JSON.stringify(job.events);
  if ($("events").told !== told) { // redrawn only when something has changed, so that text can be selected
    $("events").told = told;
    $("events").replaceChildren(...job.events.map((event) => {
      const line = element("li", null, event.type === "Warning" ? "Warning" : "");
      const time = element("time", clockTime(event.time));
      time.dateTime = event.time;
      line.append(time, ` ${event.reason ? `${event.reason}: ` : ""}${event.message}`);
      return line;
    }));
    $("events").scrollTop = $("events").scrollHeight;
  }
  const select = $("replica");
  const names = job.replicas.map((each) => each.name);
  if ([...select.options].map((each) => each.value).join() !== names.join()) {
    const before = select.value;
    select.replaceChildren(...names.map((name) => new Option(name, name)));
    const failed = job.replicas.find((each) => each.state === "Failed");
    select.value = names.includes(before) ? before : failed?.name ?? names.find((name) => name.startsWith("trainer")) ?? names[0];
    if (select.value !== before) log.restart();
  }
}

// --- the log

const log = {
  cursor: "",
  turn: 0,
  restart() {
    this.turn += 1;
    this.cursor = "";
    $("log").replaceChildren();
  },
  async read() {
    const [turn, id, replica] = [this.turn, state.shown, $("replica").value];
    if (!id || !replica || !$("follow").checked) return;
    const answer = await ask("/api/log", { id, replica, cursor: this.cursor });
    if (turn !== this.turn) return; // another log was chosen meanwhile
    this.cursor = answer.next;
    $("log-note").textContent = answer.note || "";
    if (!answer.lines.length) return;
    const pre = $("log");
    pre.append(`${answer.lines.join("\n")}\n`);
    while (pre.textContent.length > LOG_CHARS && pre.childNodes.length > 1) pre.firstChild.remove();
    pre.scrollTop = pre.scrollHeight;
  },
};

// --- the loop: nothing is asked for while the page is not visible

async function refresh() {
  drawJobs(await ask("/api/jobs"));
  if (!state.jobs.some((job) => job.id === state.shown)) {
    state.shown = state.jobs[0]?.id ?? null;
    log.restart();
  }
  const wanted = new Set([state.shown, ...state.compared].filter((id) => state.jobs.some((job) => job.id === id)));
  const answers = await Promise.allSettled([...wanted].map(async (id) => {
    const known = state.details.get(id);
    if (known && id !== state.shown && FINAL.includes(known.state) && known.ended) return;
    state.details.set(id, { ...await ask("/api/job", { id }), answered: state.clock });
  }));
  const job = state.details.get(state.shown);
  $("detail").hidden = !job;
  if (job) drawDetail(job);
  const failed = answers.find((each) => each.status === "rejected");
  if (failed) throw failed.reason;
  await log.read();
}

/** Say why something could not be read; what the page had before stays. */
function complain(error) {
  const silent = error instanceof TypeError; // of fetch: nobody answered
  const shown = state.details.get(state.shown)?.answered;
  const since = silent ? state.answered : shown < state.clock && shown;
  const told = silent ? `no answer from fleetjob ui; is it still running? (${error.message})` : error.message;
  $("problem").hidden = false;
  $("problem").textContent = since ? `as it was at ${moment(since)}: ${told}` : told;
  $("detail").classList.toggle("stale", Boolean(since));
  if (silent) document.querySelectorAll("#jobs tbody tr").forEach((row) => row.classList.add("stale"));
}

let timer = 0;
let running = false;

async function again() {
  clearTimeout(timer);
  if (running) {
    timer = setTimeout(again, 100);
    return;
  }
  running = true;
  try {
    await refresh();
    $("problem").hidden = true;
    $("detail").classList.remove("stale");
  } catch (error) {
    complain(error);
  }
  running = false;
  if (!document.hidden) timer = setTimeout(again, POLL_MS);
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) again(); });
addEventListener("hashchange", () => { readAddress(); again(); });
$("replica").addEventListener("change", () => { log.restart(); again(); });
$("follow").addEventListener("change", again);
readAddress();
writeAddress(); // without the token
again();
