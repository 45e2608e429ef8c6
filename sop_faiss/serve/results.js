"use strict";
// The images that are listed or found, as tiles, and one of them opened large.

function fill(images, heading, wantedLabel) {
  at("empty").hidden = true;
  at("more").hidden = true;
  at("heading").textContent = heading;
  at("hits").replaceChildren(...images.map((image) => card(image, wantedLabel)));
}

function card(image, wantedLabel) {
  remember([image]);
  const item = element("li", "hit");
  const link = element("a", "again", "⌕");
  link.href = addressOf({ ...asked(), ...NO_QUERY, plus: [{ key: image.key }] });
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
  if (image.box && image.box.join() !== "0,0,1,1") {
    const part = element("div", "part-mark");
    part.hidden = true; // until the image is there
    shown.addEventListener("load", () => placePart(part, shown, image.box));
    frame.append(part);
  }
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
  tile.append(element("div", "name", image.key)); // complete: two names may differ anywhere
  if (image.folded_count) tile.append(element("div", "name", `+ ${image.folded_count.toLocaleString("en")} alike`));
  item.append(tile, link);
  return item;
}

const shownImages = new WeakMap(); // tile -> what the server said of its image
const tiles = () => [...at("hits").querySelectorAll(".open")];
const viewer = makeViewer(tiles, (tile) => {
  const image = shownImages.get(tile);
  const facts = [
    ["Key", image.key, true],
    ["Label", image.label],
    ["Similarity", image.similarity !== undefined && `${image.similarity.toFixed(4)}, rank ${image.rank}`],
    ["Part", image.box && image.box.map((share) => share.toFixed(2)).join(", ")],
    ["Alike", image.folded_count && image.folded.map((each) => each.key).join(", ") + (image.folded.length < image.folded_count ? ", …" : "")],
  ];
  const actions = [button("Search by it", () => searchBy(image.key)), ...moreActions(tile, image), element("span", "folder-actions")];
  actions[0].autofocus = true;
  addDetails(tile, image, facts, actions.at(-1));
  return { name: image.key, src: `${image.thumbnail}&size=large`, facts, actions };
});

function moreActions(tile, image) {
  const view = asked();
  if (!view.plus.length) return [];
  const itself = { key: image.key };
  const actions = [
    button("More like it, too", () => go(queryWith(itself, "plus"))), button("Less like it", () => go(queryWith(itself, "minus"))),
  ];
  if (facts.shows_matches && !isSeveral(view)) actions.push(button("Where it matches", () => showMatch(tile, image)));
  return actions;
}

let matchAddress = "";

async function showMatch(tile, image) {
  const { plus: [query], box } = asked();
  const search = new URLSearchParams(query.key === undefined ? {} : { key: query.key });
  if (box) search.set("box", box);
  const address = `${image.thumbnail.replace("/thumbnail", "/match")}&${search}`;
  try {
    const headers = { "Content-Type": "application/octet-stream" };
    const answer = await fetch(address, query.key === undefined ? { method: "POST", body: uploadOf(query).file, headers } : {});
    if (!answer.ok) throw new Error((await answer.json()).error);
    if (matchAddress) URL.revokeObjectURL(matchAddress);
    matchAddress = URL.createObjectURL(await answer.blob());
    viewer.showImage(tile, matchAddress, `The query and ${image.key}: brighter where they match`);
  } catch (error) {
    viewer.showProblem(tile, error.message);
  }
}

async function addDetails(tile, image, facts, place) {
  const details = await ask(image.thumbnail.replace("/thumbnail", "")).catch(() => null);
  if (!details) return;
  const size = details.width && `${details.width.toLocaleString("en")} × ${details.height.toLocaleString("en")} px, ${kilobytes(details.file_bytes)}`;
  viewer.showFacts(tile, [["Path", details.path, true], ...facts, ["Size", size]]);
  const { folder } = details;
  place.append(
    button(`Its folder: ${count(details.folder_images)}`, () => go({ ...START, folder })),
    button("Nearest in its folder", () => go({ ...START, plus: [{ key: image.key }], folder })),
  );
}

function searchBy(key) {
  go({ ...NO_QUERY, plus: [{ key }] });
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
