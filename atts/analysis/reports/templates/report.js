(() => {
  const $ = (id) => document.getElementById(id);
  const make = (tag, kind, text) => {
    const node = document.createElement(tag);
    if (kind) node.className = kind;
    if (text !== undefined && text !== null) node.textContent = visible(String(text));
    return node;
  };
  // What a model wrote may hold terminal codes and marks that turn the direction of a line: they are shown, not obeyed.
  const visible = (text) => text
    .replace(/[\u0000-\u0008\u000b-\u001f]/g, (found) => String.fromCharCode(0x2400 + found.charCodeAt(0)))
    .replace(/[\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g,
      (found) => `\\u${found.charCodeAt(0).toString(16).padStart(4, "0")}`);

  // The table of problems can be searched and filtered.
  const table = $("problem-table");
  const filter = () => {
    const find = $("find").value.trim().toLowerCase(), show = $("show").value;
    let shown = 0;
    for (const row of table.tBodies[0].rows) {
      const right = row.cells[2].textContent === "correct", flagged = row.cells[12].textContent !== "";
      const fits = !show || (show === "correct" ? right : show === "wrong" ? !right : flagged);
      row.hidden = !fits || (find !== "" && !row.textContent.toLowerCase().includes(find));
      shown += row.hidden ? 0 : 1;
    }
    $("shown").textContent = `${shown} of ${table.tBodies[0].rows.length} problems`;
  };
  if (table) {
    $("find").addEventListener("input", filter);
    $("show").addEventListener("change", filter);
    filter();
  }

  // Problem pages: unpacked only when opened; model output becomes text nodes, never markup.
  const unpack = async (packed) => {
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
    return JSON.parse(await new Response(stream).text());
  };
  const number = (value) => {
    if (typeof value !== "number") return value ?? "none";
    return Math.abs(value) >= 1e6 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  };
  // a product over the tokens of a long chunk is a power of e; its digits say nothing
  const score = (value) =>
    typeof value === "number" && value >= 1000 ? `e^${Math.log(value).toFixed(1)}` : number(value);
  const words = { correct: "correct", wrong: "wrong", unscored: "unscored" };
  const ends = {
    answer: "ended with its answer", end: "ended without an answer", turns: "cut at the limit of turns",
    tokens: "cut at the limit of tokens", settled: "cancelled: the vote was settled", cancelled: "cancelled",
  };

  const chunk = ([author, fate, text, tokens, ended]) => {
    const node = make("div", `chunk ${author} ${fate}`);
    const what = fate === "kept" ? (author === "draft" ? "draft, kept" : "target") : `${author}, ${fate}`;
    node.append(make("div", "who", `${what} · ${tokens} tokens · ended by ${ended}`), make("div", "text", text.trimEnd()));
    return node;
  };
  const turn = (each) => {
    const node = make("div", "turn");
    const parts = [`Turn ${each.i}`];
    if (each.score !== null) parts.push(`score ${score(each.score)}`);
    if (each.p !== null && !each.why) parts.push(`p ${number(each.p)}`);
    if (each.action) parts.push(each.action === "escalate" ? "escalated to the target" : "accepted");
    if (each.level) parts.push(each.level);
    if (each.why) parts.push(each.why);
    if (each.note) parts.push(each.note);
    node.append(make("div", "facts", parts.join(" · ")), ...each.chunks.map(chunk));
    return node;
  };
  const rollout = (each, open) => {
    const node = make("details", "rollout");
    const said = words[each.verdict] ? ` · ${words[each.verdict]}` : "";
    const answer = each.answer === null ? "no answer" : `answer ${each.answer}`;
    const flags = each.flags.length ? ` · ⚑ ${each.flags.join(", ")}` : "";
    const summary = `Rollout ${each.n}: ${answer}${said} · ${ends[each.finish] || each.finish} · ${each.turns.length} turns · ` +
      `${each.draft} draft, ${each.target} target tokens${flags}`;
    node.append(make("summary", "", summary));
    node.dataset.n = each.n;
    const fill = () => {
      if (node.childElementCount > 1) return;
      if (each.error) node.append(make("p", "note", each.error));
      if (each.rule) node.append(make("p", "note", `Graded by: ${each.rule}`));
      node.append(...each.turns.map(turn));
    };
    node.addEventListener("toggle", () => node.open && fill());
    if (open) { fill(); node.open = true; }
    return node;
  };
  const votes = (page) => {
    const most = Math.max(...page.votes.map((vote) => vote[1]), 1e-9);
    const list = make("ul", "votes");
    for (const [answer, weight] of page.votes) {
      const share = "█".repeat(Math.max(1, Math.round((weight / most) * 12)));
      list.append(make("li", "text", `${share} ${number(weight)} for ${answer}`));
    }
    return list;
  };
  const link = (text, place) => {
    const button = make("button", "go", text);
    button.type = "button";
    button.addEventListener("click", () => { location.hash = place; });
    return button;
  };

  const shown = (whole) => {
    $("main").hidden = !whole;
    document.querySelector("header").hidden = !whole;
  };

  const open = async (place, sample) => {
    const holder = $(`packed-${place}`);
    if (!holder || !holder.textContent) return;
    const page = await unpack(holder.textContent), target = $("page");
    const bar = make("div", "bar-of-page");
    bar.append(link("← All problems", "problems"));
    if ($(`packed-${place - 1}`)) bar.append(link("Previous", `problem-${place - 1}`));
    if ($(`packed-${place + 1}`)) bar.append(link("Next", `problem-${place + 1}`));
    const title = make("h2", "", `Problem ${page.id}`);
    title.tabIndex = -1;
    const facts = [`answer ${page.answer ?? "none"}`, page.reference === null ? "no reference" : `reference ${page.reference}`,
      page.verdict ? words[page.verdict] : page.status];
    if (page.rule) facts.push(`graded by: ${page.rule}`);
    if (page.why) facts.push(page.why);
    target.replaceChildren(bar, title, make("p", "text", page.text), make("p", "", facts.join(" · ")),
      make("h3", "", "Votes"), page.votes.length ? votes(page) : make("p", "note", "No rollout has an answer."),
      make("h3", "", "Rollouts"), ...page.rollouts.map((each) => rollout(each, each.n === sample)));
    target.hidden = false;
    shown(false);
    title.focus();
    const wanted = sample === undefined ? null : target.querySelector(`.rollout[data-n="${sample}"]`);
    if (wanted) wanted.scrollIntoView(); else scrollTo(0, 0);
  };
  const route = () => {
    const found = /^#problem-(\d+)(?:\/(\d+))?$/.exec(location.hash);
    if (found) return open(Number(found[1]), found[2] === undefined ? undefined : Number(found[2]));
    if ($("main").hidden) {
      $("page").hidden = true;
      shown(true);
      const section = $(location.hash.slice(1));
      if (section) section.scrollIntoView();
    }
  };
  addEventListener("hashchange", route);
  // Folded data is worth paper too.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("figure details:not([open])")];
    for (const each of folded) each.open = true;
  });
  addEventListener("afterprint", () => { for (const each of folded) each.open = false; });
  route();
})();
