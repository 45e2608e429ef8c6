"use strict";
// One page, whose address says what it shows: what is searched by (?key=KEY or ?upload=N, an image of this visit, any number
// of them, less ?minus-key= and ?minus-upload=), or the index; &box= is a part of the first; the others narrow what is found.
// It stands on viewer.js, part.js, query.js and results.js.
// All text is set by textContent: names of files and labels are never parsed as HTML.

const PAGE = 48;
let facts = null;
let running = null; // AbortController of the pending request

function go(changes) {
  const view = { ...asked(), ...changes };
  history.replaceState({ scroll: scrollY }, "");
  history.pushState({ scroll: 0 }, "", addressOf(view));
  show();
}

async function ask(address, options) {
  let answer;
  try {
    answer = await fetch(address, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server does not answer");
  }
  const content = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
  if (!answer.ok) throw new Error(content.error || `the server answered ${answer.status}`);
  return content;
}

function filterOf(view) {
  const search = new URLSearchParams({ k: view.k });
  for (const name of FILTERS) if (view[name]) search.set(name, view[name]);
  if (view.folder !== null) search.set("folder", view.folder);
  if (view.box && !isSeveral(view)) search.set("box", view.box);
  return search;
}

// What the server says of an image is of the index as it is now, which may have changed since the page was opened.
async function notice(images) {
  if (images.length && !images[0].thumbnail.endsWith(`version=${facts.version}`)) await refresh();
}

async function refresh() {
  facts = await ask("/api/index").catch(() => facts);
  showFacts();
}

async function show() {
  if (running) running.abort();
  viewer.leave();
  const mine = (running = new AbortController());
  const view = asked();
  showFilters(view);
  at("hits").classList.add("waiting");
  try {
    if (!view.plus.length) await showIndex(view, mine.signal);
    else if (isSeveral(view)) await showSeveral(view, mine.signal);
    else if (view.plus[0].key !== undefined) await showKey(view, mine.signal);
    else await showUpload(view, mine.signal);
    if (running !== mine) return;
    scrollTo(0, (history.state && history.state.scroll) || 0);
  } catch (error) {
    if (running !== mine) return; // another view is being shown
    const badFilter = error.message.startsWith("where");
    fill([], badFilter ? "This filter cannot be used" : "Not found");
    showEmpty(error.message, true);
    at("where").setAttribute("aria-invalid", badFilter);
    refresh(); // the image may have left the index
  }
  at("hits").classList.remove("waiting");
}

async function showIndex(view, signal) {
  const page = await ask("/api/images?" + listOf(view, 0), { signal });
  showQuery(null, facts.accepts_images ? "No image yet" : "No image chosen", "");
  document.title = facts.name;
  await notice(page.images);
  fill(page.images, `${count(page.total)} of ${folderName(view) || "the index"}${passing(view)}: to search by one, open it, or press ⌕ at its corner`);
  showMore(page);
}

function listOf(view, offset) {
  const search = new URLSearchParams({ offset, limit: PAGE, mixed: !view.label && !view.where && view.folder === null });
  for (const name of ["label", "where"]) if (view[name]) search.set(name, view[name]);
  if (view.folder !== null) search.set("folder", view.folder);
  return search;
}

function showMore(page) {
  at("more").hidden = at("hits").children.length >= page.total;
}

async function showKey(view, signal) {
  const search = filterOf(view);
  search.set("key", view.plus[0].key);
  const answer = await ask("/api/search?" + search, { signal });
  showQuery(answer.query.thumbnail + "&size=large", answer.query.label || "", answer.query.key);
  document.title = `${answer.query.key} · ${facts.name}`;
  showAnswer(answer);
}

async function showUpload(view, signal) {
  document.title = facts.name;
  showQuery(null, "", "");
  const { file, address } = uploadOf(view.plus[0]);
  showQuery(address, "Your image", file.name || "pasted");
  at("heading").textContent = "Searching";
  requireSize(file);
  const headers = { "Content-Type": "application/octet-stream" };
  showAnswer(await ask("/api/search?" + filterOf(view), { method: "POST", body: file, headers, signal }));
}

async function showSeveral(view, signal) {
  document.title = facts.name;
  showQuery(null, `Searching with ${count(view.plus.length + view.minus.length)}`, "");
  at("query-frame").hidden = true;
  showStrip(view);
  const [plus, minus] = await Promise.all([view.plus, view.minus].map((images) => Promise.all(images.map(sent))));
  if (view.box) plus[0].box = view.box.split(",").map(Number);
  const headers = { "Content-Type": "application/json" };
  const answer = await ask("/api/search/together?" + filterOf(view), { method: "POST", body: JSON.stringify({ plus, minus }), headers, signal });
  remember([...answer.plus, ...answer.minus]);
  showStrip(view);
  const labels = new Set(answer.plus.map((image) => image && image.label));
  showAnswer(answer, labels.size === 1 ? [...labels][0] : null);
}

function showAnswer(answer, label = answer.query && answer.query.label) {
  const within = (answer.label === null ? "" : ` of ${answer.label}`) + (answer.folder === null ? "" : ` in ${folderName(answer)}`);
  notice(answer.found);
  const order = answer.rerank === null ? "by cosine similarity" : `re-ranked: ${answer.rerank}; numbers are cosine similarities`;
  fill(answer.found, `${answer.found.length} nearest${within}${passing(answer)}, ${order}`, label);
  if (!answer.found.length) showEmpty("Nothing found.", false);
  at("more").hidden = true;
}

function passing(view) {
  return view.where ? " that pass the filter" : "";
}

function showEmpty(text, failed) {
  at("empty").textContent = text;
  at("empty").classList.toggle("error", failed);
  at("empty").hidden = false;
}

function showQuery(image, label, name) {
  const shown = at("query-image");
  shown.hidden = image === null;
  at("query-problem").textContent = image === null ? "+" : "";
  at("query-frame").classList.toggle("blank", image === null);
  at("query-frame").hidden = image === null && !facts.accepts_images;
  if (image === null) shown.removeAttribute("src");
  else if (shown.getAttribute("src") !== image) shown.src = image;
  shown.alt = name;
  showPart();
  at("query-label").textContent = label;
  at("query-name").textContent = name;
}

// Marks a part in shares of the image in its frame; the image is as large as the frame allows.
function showPart() {
  placePart(at("query-part"), at("query-image"), sharesOf(asked().box));
}

function placePart(mark, shown, shares) {
  const [width, height] = [shown.naturalWidth, shown.naturalHeight];
  const side = Math.max(width, height);
  mark.hidden = shown.hidden || !side || !shares;
  if (mark.hidden) return;
  const onFrame = (share, length) => (100 * ((side - length) / 2 + share * length)) / side; // percent
  Object.assign(mark.style, {
    left: `${onFrame(shares[0], width)}%`, right: `${100 - onFrame(shares[2], width)}%`,
    top: `${onFrame(shares[1], height)}%`, bottom: `${100 - onFrame(shares[3], height)}%`,
  });
}

function showFilters(view) {
  for (const id of ["k", "unique", "rerank", "label"]) {
    if (![...at(id).options].some((option) => option.value === view[id])) at(id).add(new Option(view[id]));
    at(id).value = view[id];
  }
  at("where").value = view.where;
  at("parts").checked = Boolean(view.parts);
  at("where").removeAttribute("aria-invalid");
  at("with").hidden = true;
  const isOne = view.plus.length === 1 && !isSeveral(view);
  at("add-label").hidden = !view.plus.length;
  at("drop-hint").hidden = view.plus.length > 0;
  at("part").hidden = !isOne;
  at("whole").hidden = !view.box;
  at("folder").hidden = view.folder === null;
  at("folder").textContent = `${folderName(view)} ✕`;
}

function folderName(view) {
  return view.folder === null ? "" : view.folder === "" ? "the top folder" : `folder ${view.folder}`;
}

// Links can be opened in a new tab or copied; a plain click stays on the page.
function followed(event) {
  return event.button === 0 && !event.metaKey && !event.ctrlKey && !event.shiftKey && !event.altKey;
}

function listen() {
  at("hits").addEventListener("click", (event) => {
    const link = event.target.closest("a");
    if (!link || !followed(event)) return;
    event.preventDefault();
    searchBy(link.dataset.key);
  });
  at("home").addEventListener("click", (event) => {
    if (!followed(event)) return;
    event.preventDefault();
    go(START);
  });
  for (const [id, before] of [["file", () => []], ["add", () => asked().plus]]) {
    at(id).addEventListener("change", () => {
      upload(at(id).files, before());
      at(id).value = ""; // so that the same file can be chosen again
    });
  }
  for (const id of ["label", "k", "unique", "rerank", "where"]) at(id).addEventListener("change", () => go({ [id]: at(id).value.trim() }));
  at("parts").addEventListener("change", () => go({ parts: at("parts").checked ? "true" : "" }));
  at("folder").addEventListener("click", () => go({ folder: null }));
  at("part").addEventListener("click", choosePart);
  at("whole").addEventListener("click", () => go({ box: null }));
  at("query-image").addEventListener("load", showPart);
  at("filters").addEventListener("submit", (event) => event.preventDefault());
  at("query-image").addEventListener("error", () => {
    at("query-image").hidden = true;
    at("query-problem").textContent = "cannot be shown here";
  });
  at("more").addEventListener("click", more);
  addEventListener("popstate", show);
  addEventListener("paste", (event) => upload(event.clipboardData.files));
  listenForDrops();
  addEventListener("keydown", pressed);
}

const parts = makePartChooser((box) => go({ box: box && box.map((share) => share.toFixed(4)).join(",") }));

function choosePart() {
  parts.open(at("query-image").src, at("query-image").alt, sharesOf(asked().box));
}

async function more() {
  const mine = running;
  at("more").disabled = true;
  try {
    const page = await ask("/api/images?" + listOf(asked(), at("hits").children.length), { signal: mine.signal });
    if (running !== mine) return;
    if (page.images.length && !page.images[0].thumbnail.endsWith(`version=${facts.version}`)) return void show();
    at("hits").append(...page.images.map((image) => card(image)));
    showMore(page);
  } catch (error) {
    if (running === mine) showEmpty(error.message, true);
  } finally {
    at("more").disabled = false;
  }
}

function listenForDrops() {
  const carries = (event) => facts && facts.accepts_images && [...event.dataTransfer.types].includes("Files");
  addEventListener("dragover", (event) => {
    event.preventDefault();
    at("drop").hidden = !carries(event);
  });
  addEventListener("dragleave", (event) => {
    if (event.relatedTarget === null) at("drop").hidden = true;
  });
  addEventListener("drop", (event) => {
    event.preventDefault();
    at("drop").hidden = true;
    upload(event.dataTransfer.files);
  });
}

function pressed(event) {
  if (event.metaKey || event.ctrlKey || event.altKey || event.target.tagName === "SELECT" || event.target === at("where")) return;
  const key = event.key.toLowerCase();
  if (key === "o" && facts && facts.accepts_images) at("file").click();
  else if (key === "l" && !at("label-field").hidden) at("label").focus();
  else if (key === "f") at("where").focus();
  else if (key === "b" && !at("part").hidden) choosePart();
  else if (key === "escape" && location.search) go(START);
  else if (key === "s" && shownImages.has(document.activeElement)) searchBy(document.activeElement.dataset.key);
  else if (key.startsWith("arrow")) moveFocus(event, tiles());
  else return;
  if (!key.startsWith("arrow")) event.preventDefault();
}

async function start() {
  history.scrollRestoration = "manual";
  try {
    facts = await ask("/api/index");
  } catch (error) {
    at("heading").textContent = "Not found";
    showEmpty(error.message, true);
    return;
  }
  showFacts();
  listen();
  show();
}

function showFacts() {
  at("facts").textContent = `${facts.name} · ${count(facts.images)} · encoder ${facts.encoder} · ${facts.factory} index`;
  at("choose").hidden = !facts.accepts_images;
  at("no-encoder").hidden = facts.accepts_images;
  at("label-field").hidden = at("label-key").hidden = !facts.labels.length;
  const [all] = at("label").options;
  at("label").replaceChildren(all, ...facts.labels.map((label) => new Option(`${label.name} (${label.images})`, label.name)));
  at("label").value = asked().label;
  at("parts-field").hidden = !facts.has_parts;
  at("where").placeholder = `such as ${facts.labels.length ? "label = 'shoe'" : "member like '%2024%'"}`;
  at("columns").textContent = `Columns: ${facts.columns.join(", ")}`;
  const [bySimilarity] = at("rerank").options;
  at("rerank").replaceChildren(bySimilarity, ...facts.rerank.map((method) => new Option(`re-ranked: ${method}`, method)));
  at("rerank").value = asked().rerank;
}

start();
