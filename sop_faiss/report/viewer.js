"use strict";
// What the static pages and the served one share: an image that opens large, with its facts and with what can be done.
// All text is set by textContent: names of files and labels are never parsed as HTML.

const ROW_DIFFERS = 4; // pixels
const FARTHEST_TILE = 200; // tiles that are looked at for the next row

function element(kind, name, text) {
  const made = document.createElement(kind);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

function button(text, run, name = "button small") {
  const made = element("button", name, text);
  made.type = "button";
  made.addEventListener("click", run);
  return made;
}

// Quotes one word for a shell; the commands on a page are made to be pasted into one.
function shellWord(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

async function copyText(text, place) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // no permission, or a page that did not come by https
    const field = element("textarea", "copied", text);
    place.append(field); // inside the dialog: all else cannot be selected
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

function copyButton(text) {
  const made = button("Copy", async () => {
    made.textContent = (await copyText(text, made.parentElement)) ? "Copied" : "Not allowed: select it";
    setTimeout(() => { made.textContent = "Copy"; }, 1500);
  });
  made.setAttribute("aria-live", "polite");
  return made;
}

// The tile that an arrow key leads to; up and down keep the column.
function neighborOf(here, key, tiles) {
  const place = tiles.indexOf(here);
  if (key === "ArrowLeft") return tiles[place - 1];
  if (key === "ArrowRight") return tiles[place + 1];
  const ahead = key === "ArrowDown" ? tiles.slice(place + 1, place + FARTHEST_TILE) : tiles.slice(Math.max(0, place - FARTHEST_TILE), place).reverse();
  const from = here.getBoundingClientRect();
  let row = null;
  let best;
  let least = Infinity;
  for (const tile of ahead) {
    const box = tile.getBoundingClientRect();
    if (Math.abs(box.top - from.top) < ROW_DIFFERS) continue;
    row ??= box.top;
    if (Math.abs(box.top - row) >= ROW_DIFFERS) break;
    const gap = Math.abs(box.left - from.left);
    if (gap < least) [best, least] = [tile, gap];
  }
  return best;
}

function moveFocus(event, tiles) {
  const here = tiles.includes(document.activeElement) ? document.activeElement : null;
  if (!here && (event.key === "ArrowUp" || event.key === "ArrowDown")) return; // scrolls
  const target = here ? neighborOf(here, event.key, tiles) : tiles[0];
  if (!target) return;
  event.preventDefault();
  target.focus();
}

// tiles(): all that can be opened, in order. describe(tile): {name, src, tiny, problem, facts, actions}; a fact is
// [what, text, whether it can be copied], an action an element.
function makeViewer(tiles, describe) {
  const dialog = element("dialog", "large");
  const place = element("span", "large-place");
  const image = element("div", "large-image");
  const name = element("h2", "large-name");
  const facts = element("dl");
  const actions = element("div", "large-actions");
  const bar = element("div", "large-bar");
  const [before, after, close] = [
    button("‹", () => step(-1), "button small plain"), button("›", () => step(1), "button small plain"),
    button("✕", () => dialog.close(), "button small plain"),
  ];
  [[before, "Previous image"], [after, "Next image"], [close, "Close"]].forEach(([made, label]) => made.setAttribute("aria-label", label));
  name.id = "large-name";
  dialog.setAttribute("aria-labelledby", name.id);
  bar.append(place, before, after, close);
  const text = element("div", "large-text");
  text.append(name, facts, actions);
  dialog.append(bar, image, text);
  document.body.append(dialog);
  let here = null;
  let opener = null;

  function step(by) {
    const next = tiles()[tiles().indexOf(here) + by];
    if (next) open(next);
  }

  function showFacts(rows) {
    facts.replaceChildren(...rows.filter(([, shown]) => shown).flatMap(([what, shown, copied]) => {
      const value = element("dd");
      value.append(element("span", "", shown));
      if (copied) value.append(copyButton(shown));
      return [element("dt", "", what), value];
    }));
  }

  function showProblem(reason) {
    image.replaceChildren(element("div", "problem", `⊘ ${reason}`));
  }

  function showImage(src, name, tiny) {
    const picture = element("img", tiny ? "tiny" : "");
    picture.alt = name;
    picture.addEventListener("error", () => { if (picture.isConnected) showProblem("cannot be shown"); });
    picture.addEventListener("load", () => {
      if (Math.max(picture.naturalWidth, picture.naturalHeight) <= 64) picture.classList.add("tiny");
    });
    picture.src = src;
    image.replaceChildren(picture);
  }

  function open(tile) {
    here = tile;
    const all = tiles();
    const shown = describe(tile);
    place.textContent = `${all.indexOf(tile) + 1} of ${all.length}`;
    before.disabled = tile === all[0];
    after.disabled = tile === all.at(-1);
    name.textContent = shown.name;
    if (shown.src) showImage(shown.src, shown.name, shown.tiny);
    else showProblem(shown.problem || "no image");
    showFacts(shown.facts);
    actions.replaceChildren(...shown.actions);
    if (!dialog.open) {
      opener = document.activeElement;
      dialog.showModal();
      (actions.querySelector("[autofocus]") || close).focus();
    }
  }

  dialog.addEventListener("close", () => { // comes late: a key may have moved the focus on from where the browser put it
    if (here?.isConnected && [opener, document.body].includes(document.activeElement)) here.focus();
  });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  dialog.addEventListener("keydown", (event) => {
    event.stopPropagation(); // the page's own keys wait
    if (event.metaKey || event.ctrlKey || event.altKey) return;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      event.preventDefault();
      step(event.key === "ArrowLeft" ? -1 : 1);
    } else if (event.key === "c") facts.querySelector("button")?.click();
    else if (event.key === "x") actions.querySelector("input")?.click();
  });
  const leave = () => { here = null; dialog.close(); }; // for another view: the tile does not get the focus back
  // for what comes later: it is shown only if the tile still is
  const ifShown = (run) => (tile, ...given) => { if (dialog.open && here === tile) run(...given); };
  return { open, leave, showFacts: ifShown(showFacts), showImage: ifShown(showImage), showProblem: ifShown(showProblem) };
}
