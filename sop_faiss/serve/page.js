// One page, whose address says what it shows: ?key=KEY, ?upload=N (an image of this visit), or neither; &label=, &folder=, &k=.
// It stands on viewer.js.
// All text is set by textContent: names of files and labels are never parsed as HTML.

const at = (id) => document.getElementById(id);
const uploads = new Map(); // number -> File; lost when the page is left
const PAGE = 48;
let facts = null;
let running = null; // AbortController of the pending request
let previewAddress = "";

const DEFAULT_K = at("k").value;

function asked() {
  const search = new URLSearchParams(location.search);
  return { key: search.get("key"), upload: search.get("upload"), label: search.get("label") || "", folder: search.get("folder"), k: search.get("k") || DEFAULT_K };
}

function addressOf(view) {
  const search = new URLSearchParams();
  if (view.key !== null) search.set("key", view.key);
  if (view.upload !== null) search.set("upload", view.upload);
  if (view.label) search.set("label", view.label);
  if (view.folder !== null) search.set("folder", view.folder);
  if (view.k !== DEFAULT_K) search.set("k", view.k);
  const text = search.toString();
  return text ? "/?" + text : "/";
}

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
  if (view.label) search.set("label", view.label);
  if (view.folder !== null) search.set("folder", view.folder);
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
    if (view.upload !== null) await showUpload(view, mine.signal);
    else if (view.key !== null) await showKey(view, mine.signal);
    else await showIndex(view, mine.signal);
    if (running !== mine) return;
    scrollTo(0, (history.state && history.state.scroll) || 0);
  } catch (error) {
    if (running !== mine) return; // another view is being shown
    fill([], "Not found");
    showEmpty(error.message, true);
    refresh(); // the image may have left the index
  }
  at("hits").classList.remove("waiting");
}

async function showIndex(view, signal) {
  const page = await ask("/api/images?" + listOf(view, 0), { signal });
  showQuery(null, facts.accepts_images ? "No image yet" : "No image chosen", "");
  document.title = facts.name;
  await notice(page.images);
  fill(page.images, `${count(page.total)} of ${folderName(view) || "the index"}: choose one as the query`);
  showMore(page);
}

function listOf(view, offset) {
  const search = new URLSearchParams({ offset, limit: PAGE, mixed: !view.label && view.folder === null });
  if (view.label) search.set("label", view.label);
  if (view.folder !== null) search.set("folder", view.folder);
  return search;
}

function showMore(page) {
  at("more").hidden = at("hits").children.length >= page.total;
}

async function showKey(view, signal) {
  const search = filterOf(view);
  search.set("key", view.key);
  const answer = await ask("/api/search?" + search, { signal });
  showQuery(answer.query.thumbnail + "&size=large", answer.query.label || "", answer.query.key);
  document.title = `${answer.query.key} · ${facts.name}`;
  showAnswer(answer);
}

async function showUpload(view, signal) {
  const file = uploads.get(view.upload);
  document.title = facts.name;
  if (!file) {
    showQuery(null, "", "");
    fill([], "Not found");
    showEmpty("The image of this address is from an earlier visit: choose it again.", true);
    return;
  }
  if (previewAddress) URL.revokeObjectURL(previewAddress);
  previewAddress = URL.createObjectURL(file);
  showQuery(previewAddress, "Your image", file.name || "pasted");
  at("heading").textContent = "Searching";
  if (file.size > facts.max_upload_bytes) {
    throw new Error(`the image has ${megabytes(file.size)}, the limit is ${megabytes(facts.max_upload_bytes)}`);
  }
  const headers = { "Content-Type": "application/octet-stream" };
  showAnswer(await ask("/api/search?" + filterOf(view), { method: "POST", body: file, headers, signal }));
}

function showAnswer(answer) {
  const within = (answer.label === null ? "" : ` of ${answer.label}`) + (answer.folder === null ? "" : ` in ${folderName(answer)}`);
  notice(answer.found);
  fill(answer.found, `${answer.found.length} nearest${within}, by cosine similarity`, answer.query && answer.query.label);
  if (!answer.found.length) showEmpty("Nothing found.", false);
  at("more").hidden = true;
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
  at("query-label").textContent = label;
  at("query-name").textContent = name;
}

function showFilters(view) {
  at("label").value = view.label;
  if (![...at("k").options].some((option) => option.value === view.k)) at("k").add(new Option(view.k));
  at("k").value = view.k;
  at("folder").hidden = view.folder === null;
  at("folder").textContent = `${folderName(view)} ✕`;
}

function folderName(view) {
  return view.folder === null ? "" : view.folder === "" ? "the top folder" : `folder ${view.folder}`;
}

function fill(images, heading, wantedLabel) {
  at("empty").hidden = true;
  at("more").hidden = true;
  at("heading").textContent = heading;
  at("hits").replaceChildren(...images.map((image) => card(image, wantedLabel)));
}

function card(image, wantedLabel) {
  const item = element("li", "hit");
  const link = element("a", "again", "⌕");
  link.href = addressOf({ ...asked(), key: image.key, upload: null });
  link.title = "Search by it";
  link.setAttribute("aria-label", `Search by ${image.key}`);
  const tile = button("", () => viewer.open(tile), "open");
  tile.title = image.label ? `${image.key}\n${image.label}` : image.key;
  tile.dataset.key = link.dataset.key = image.key;
  shownImages.set(tile, image);
  const frame = element("div", "frame");
  const shown = element("img");
  shown.loading = "lazy";
  shown.decoding = "async";
  shown.alt = image.key;
  shown.addEventListener("load", () => shown.classList.toggle("tiny", Math.max(shown.naturalWidth, shown.naturalHeight) <= 64));
  shown.addEventListener("error", () => shown.replaceWith(element("div", "problem", "⊘ cannot be shown")));
  shown.src = image.thumbnail;
  frame.append(shown);
  if (wantedLabel && image.label) {
    const right = wantedLabel === image.label;
    item.classList.add(right ? "right" : "wrong");
    const mark = element("span", "mark", right ? "✓" : "✕");
    mark.setAttribute("role", "img");
    mark.setAttribute("aria-label", right ? "same label" : "another label");
    frame.append(mark);
  }
  tile.append(frame);
  if (image.similarity !== undefined) {
    const similarity = element("div", "similarity", image.similarity.toFixed(4));
    similarity.append(element("span", "rank", image.rank));
    tile.append(similarity);
  }
  if (image.label) tile.append(element("div", "label", image.label));
  tile.append(nameOf(image.key));
  item.append(tile, link);
  return item;
}

// A name that is too long loses its middle: names often differ at the end.
function nameOf(key) {
  const name = element("div", "name");
  name.append(element("bdi", "", key.slice(0, -10)), element("bdi", "", key.slice(-10)));
  return name;
}

const shownImages = new WeakMap(); // tile -> what the server said of its image
const tiles = () => [...at("hits").querySelectorAll(".open")];
const viewer = makeViewer(tiles, (tile) => {
  const image = shownImages.get(tile);
  const facts = [
    ["Key", image.key, true],
    ["Label", image.label],
    ["Similarity", image.similarity !== undefined && `${image.similarity.toFixed(4)}, rank ${image.rank}`],
  ];
  const actions = [button("Search by it", () => searchBy(image.key)), element("span", "folder-actions")];
  actions[0].autofocus = true;
  addDetails(tile, image, facts, actions[1]);
  return { name: image.key, src: `${image.thumbnail}&size=large`, facts, actions };
});

async function addDetails(tile, image, facts, place) {
  const details = await ask(image.thumbnail.replace("/thumbnail", "")).catch(() => null);
  if (!details) return;
  const size = details.width && `${details.width.toLocaleString("en")} × ${details.height.toLocaleString("en")} px, ${kilobytes(details.file_bytes)}`;
  viewer.showFacts(tile, [["Path", details.path, true], ...facts, ["Size", size]]);
  const { folder } = details;
  place.append(
    button(`Its folder: ${count(details.folder_images)}`, () => go({ key: null, upload: null, label: "", folder })),
    button("Nearest in its folder", () => go({ key: image.key, upload: null, label: "", folder })),
  );
}

function searchBy(key) {
  go({ key, upload: null });
  at("heading").focus({ preventScroll: true });
}

function kilobytes(bytes) {
  return bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB` : megabytes(bytes);
}

function count(number) {
  return `${number.toLocaleString("en")} ${number === 1 ? "image" : "images"}`;
}

function megabytes(bytes) {
  return `${(bytes / 1e6).toFixed(1)} MB`;
}

function upload(file) {
  if (!file || !facts || !facts.accepts_images) return;
  const number = String(uploads.size + 1);
  uploads.set(number, file);
  go({ upload: number, key: null });
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
    go({ key: null, upload: null, label: "", folder: null });
  });
  at("file").addEventListener("change", () => {
    upload(at("file").files[0]);
    at("file").value = ""; // so that the same file can be chosen again
  });
  at("label").addEventListener("change", () => go({ label: at("label").value }));
  at("folder").addEventListener("click", () => go({ folder: null }));
  at("k").addEventListener("change", () => go({ k: at("k").value }));
  at("filters").addEventListener("submit", (event) => event.preventDefault());
  at("query-image").addEventListener("error", () => {
    at("query-image").hidden = true;
    at("query-problem").textContent = "cannot be shown here";
  });
  at("more").addEventListener("click", more);
  addEventListener("popstate", show);
  addEventListener("paste", (event) => upload([...event.clipboardData.files][0]));
  listenForDrops();
  addEventListener("keydown", pressed);
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
    upload(event.dataTransfer.files[0]);
  });
}

function pressed(event) {
  if (event.metaKey || event.ctrlKey || event.altKey || event.target.tagName === "SELECT") return;
  const key = event.key.toLowerCase();
  if (key === "o" && facts && facts.accepts_images) at("file").click();
  else if (key === "l" && !at("label-field").hidden) at("label").focus();
  else if (key === "escape" && location.search) go({ key: null, upload: null, label: "", folder: null });
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
}

start();
