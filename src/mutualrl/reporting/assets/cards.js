// Cards of rescues and of samples: paging, filters, links. Model output is inserted as text, never as markup.
const cards = (() => {
  const element = (tag, text, name) => {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    if (name) node.className = name;
    return node;
  };
  const plain = (value) => typeof value === "string" ? value : value.map(([role, text]) => `${role}: ${text}`).join("\n");
  // A long turn is folded: its first line stays.
  const turn = (said) => {
    if (said.length <= 400) return element("div", said === "" ? "(empty)" : said);
    const box = element("details"), first = said.slice(0, 120).split("\n")[0];
    box.append(element("summary", `${first} ... (${said.length} characters)`), element("div", said));
    return box;
  };
  const narrow = matchMedia("(max-width: 40rem)").matches;
  // A text is one message; a conversation shows the role of each. On a phone a conversation is folded to its last turn.
  const text = (value, name) => {
    const box = element("div", undefined, "text" + (name ? " " + name : ""));
    if (typeof value === "string") {
      box.textContent = value === "" ? "(empty)" : value;
      return box;
    }
    const turns = value.flatMap(([role, said]) => [element("span", role, "role"), turn(said)]);
    if (narrow && value.length > 2) {
      const folded = element("details"), last = value[value.length - 1][1].trim().slice(0, 60);
      folded.append(element("summary", `${value.length} turns, the last: ${last}`), ...turns);
      box.append(folded);
    } else box.append(...turns);
    return box;
  };

  // Return two texts as lists of [piece, differs]: a word differs if it is not in their longest common subsequence.
  // Texts have at most 4,000 characters.
  const differences = (one, other) => {
    const [ownPieces, peerPieces] = [one, other].map((value) => value.split(/(\s+)/).filter((piece) => piece !== ""));
    const isWord = (piece) => piece.trim() !== "";
    const [a, b] = [ownPieces.filter(isWord), peerPieces.filter(isWord)];
    let start = 0, end = 0;
    while (start < Math.min(a.length, b.length) && a[start] === b[start]) start++;
    while (end < Math.min(a.length, b.length) - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
    const [rows, columns] = [a.length - start - end, b.length - start - end];
    const common = Array.from({ length: rows + 1 }, () => new Uint16Array(columns + 1));
    for (let i = rows - 1; i >= 0; i--)
      for (let j = columns - 1; j >= 0; j--)
        common[i][j] = a[start + i] === b[start + j] ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
    const [left, right] = [a.map(() => false), b.map(() => false)];
    let i = 0, j = 0;
    while (i < rows || j < columns) {
      if (i < rows && j < columns && a[start + i] === b[start + j]) i++, j++;
      else if (j === columns || (i < rows && common[i + 1][j] >= common[i][j + 1])) left[start + i++] = true;
      else right[start + j++] = true;
    }
    const pieces = (texts, differ) => {
      let word = 0;
      return texts.map((piece) => [piece, isWord(piece) && differ[word++]]);
    };
    return [pieces(ownPieces, left), pieces(peerPieces, right)];
  };
  const marked = (pieces, name) => {
    const box = element("div", undefined, "text " + name);
    for (const [piece, differs] of pieces) box.append(differs ? element("mark", piece) : piece);
    return box;
  };
  // Return two texts with their differing words marked; conversations, and empty texts, as they are.
  const beside = (one, other, kind, otherKind) => {
    if (typeof one !== "string" || typeof other !== "string" || one === "" || other === "") return [text(one, kind), text(other, otherKind)];
    const [left, right] = differences(one, other);
    return [marked(left, kind), marked(right, otherKind)];
  };
  const kind = ([, reward]) => (reward > 0 ? "good" : "bad");

  const head = (box, record, several, words, link) => {
    const title = element("h3", `${record.policy}, step ${record.step}${words}` + (several ? ` (${record.run})` : ""));
    const anchor = element("a", "link", "link");
    anchor.href = link;
    anchor.setAttribute("aria-label", `Link to this card: ${title.textContent}`);
    title.append(" ", anchor);
    box.append(title, text(record.prompt, "prompt"));
  };
  const rescueCard = (rescue, box) => {
    const [first, ...others] = rescue.own, hinted = rescue.hint !== "", taught = rescue.gated ? "good" : "";
    const own = element("div"), peer = element("div"), words = element("div");
    const pair = element("div", undefined, hinted ? "pair three" : "pair");
    own.append(element("h4", `Own answers (${rescue.own.length})`));
    peer.append(element("h4", rescue.peer === "(gold)" ? "The data's solution" : `${rescue.peer}'s ${rescue.gated ? "success" : "text"}${hinted ? ", shown as a hint" : ""}`));
    pair.append(own, peer);
    if (hinted) {
      const [hint, written] = beside(rescue.hint, rescue.answer, "good", "good");
      if (first) own.append(text(first[0], kind(first)));
      peer.append(hint);
      words.append(element("h4", "Own answer to the hint, confirmed"), written);
      pair.append(words);
    } else if (first) {
      const [left, right] = beside(first[0], rescue.answer, kind(first), taught);
      own.append(left);
      peer.append(right);
    } else peer.append(text(rescue.answer, taught));
    own.append(...others.map((rollout) => text(rollout[0], kind(rollout))));
    box.append(pair);
    const parts = element("dl"), entry = (term, ...contents) => {
      const definition = element("dd");
      definition.append(...contents);
      parts.append(element("dt", term), definition);
    };
    if (rescue.later === "unknown") entry("Next visit", "unknown: rounds are missing from the exchange");
    else if (rescue.later === null) entry("Next visit", "none yet");
    else {
      const { round, correct, of, text: answer } = rescue.later;
      const answers = [element("div", `in round ${round}: ${correct} of ${of} correct`, correct ? "good" : "bad")];
      if (answer !== null) answers.push(text(answer));
      entry("Next visit", ...answers);
    }
    if (rescue.visits.length > 1) entry("All later visits", element("div", rescue.visits.map(([k, n]) => `${k}/${n}`).join("  "), "fractions"));
    box.append(parts);
  };
  const sampleCard = (sample, box) => {
    const pair = element("div", undefined, "pair");
    for (const rollout of sample.own) {
      const side = element("div");
      side.append(element("h4", rollout[1] === null ? "No reward" : `Reward ${rollout[1]}`), text(rollout[0], kind(rollout)));
      pair.append(side);
    }
    for (const [peer, answer, hinted, gated] of sample.taught) {
      const side = element("div"), whose = peer === "(gold)" ? "the data's solution" : `${peer}'s text`;
      side.append(element("h4", hinted ? `Taught: its own answer, after ${whose} as a hint` : `Taught: ${whose}`), text(answer, gated ? "good" : ""));
      pair.append(side);
    }
    box.append(pair);
  };
  const outcomes = {
    rescues: (rescue, wanted) => {
      const answered = rescue.later !== null && rescue.later !== "unknown", solved = answered && rescue.later.correct > 0;
      return { solved, unsolved: answered && !solved, never: rescue.later === null }[wanted];
    },
    samples: (sample, wanted) => {
      const solved = sample.own.some(([, reward]) => reward > 0);
      return { solved, dead: !solved, taught: sample.taught.length > 0 }[wanted];
    },
  };
  const said = {
    rescues: (rescue) => [rescue.prompt, rescue.answer, rescue.hint].map(plain).join("\n"),
    samples: (sample) => [sample.prompt, ...sample.own.map(([value]) => value)].map(plain).join("\n"),
  };

  const browser = (name, card, words) => {
    const panel = document.getElementById(name), get = (part) => document.getElementById(`${name}-${part}`);
    if (!panel || !get("list")) return null;
    const chunks = [...document.querySelectorAll(`script.${name}-data`)], parsed = new Map(), page = narrow ? 2 : name === "rescues" ? 5 : 4;
    const size = Number(panel.dataset.chunk), total = Number(panel.dataset.total);
    const record = (i) => {
      const number = Math.floor(i / size);
      if (!parsed.has(number)) parsed.set(number, JSON.parse(chunks[number].textContent));
      return parsed.get(number)[i % size];
    };
    const [list, status, search, policy, outcome, previous, next, step] = ["list", "status", "search", "policy", "outcome", "back", "on", "step"].map(get);
    let matches = null, first = 0; // matches: indices that pass the filters; null means all
    const at = (i) => matches ? matches[i] : i;
    const key = (each) => [each.run, each.policy, each.step, each.id, ...(each.n ? [each.n] : [])].map((part) => encodeURIComponent(part)).join("/");
    const link = (each) => `#${name}:${key(each)}`;

    const render = () => {
      const count = matches ? matches.length : total, last = Math.min(first + page, count), boxes = [];
      for (let i = first; i < last; i++) {
        const box = element("article", undefined, name === "rescues" ? "card rescue" : "card"), each = record(at(i));
        head(box, each, panel.dataset.several, name === "rescues" ? `, learned from ${each.peer}` : "", link(each));
        card(each, box);
        box.dataset.link = link(each);
        boxes.push(box);
      }
      list.replaceChildren(...boxes);
      status.textContent = count ? `${first + 1} to ${last} of ${count} ${words}` : `No ${words} match these filters`;
      previous.disabled = first === 0;
      next.disabled = last >= count;
    };
    // Return the newest step with samples up to `wanted` of each policy of each run.
    const member = (each) => `${each.run}/${each.policy}`;
    const upTo = (wanted) => {
      const newest = new Map();
      for (let i = 0; i < total; i++) {
        const each = record(i);
        if (each.step <= wanted) newest.set(member(each), Math.max(each.step, newest.get(member(each)) ?? 0));
      }
      return newest;
    };
    const filter = () => {
      const query = search.value.toLowerCase(), who = policy.value, wanted = outcome.value, when = step ? step.value : "";
      first = 0;
      matches = null;
      const newest = when === "" ? null : upTo(Number(when));
      if (query || who || wanted || when) {
        matches = [];
        for (let i = 0; i < total; i++) {
          const each = record(i);
          if (who && each.policy !== who || newest && each.step !== newest.get(member(each))) continue;
          if (wanted && !outcomes[name](each, wanted)) continue;
          if (query && !said[name](each).toLowerCase().includes(query)) continue;
          matches.push(i);
        }
      }
      render();
    };
    const clear = () => { for (const control of [search, policy, outcome, step]) if (control) control.value = ""; };
    const open = (target) => {
      clear();
      filter();
      for (let i = 0; i < total; i++) if (link(record(i)) === target) {
        first = Math.floor(i / page) * page;
        render();
        const box = [...list.children].find((each) => each.dataset.link === target);
        box.classList.add("target");
        box.scrollIntoView({ block: "start" });
        return;
      }
      status.textContent = `No ${words} have this link`;
      panel.scrollIntoView();
    };
    const show = (wanted, who) => {
      clear();
      policy.value = who || "";
      step.value = wanted;
      filter();
      panel.scrollIntoView();
    };
    for (const control of [search, step]) if (control) control.addEventListener("input", filter);
    for (const control of [policy, outcome]) control.addEventListener("change", filter);
    previous.addEventListener("click", () => { first = Math.max(0, first - page); render(); });
    next.addEventListener("click", () => { first += page; render(); });
    render();
    return { open, show, policies: [...policy.options].map((option) => option.value) };
  };

  const all = { rescues: browser("rescues", rescueCard, document.getElementById("rescues")?.dataset.words), samples: browser("samples", sampleCard, "samples") };
  const follow = () => {
    const name = location.hash.slice(1).split(":")[0];
    if (location.hash.includes(":") && Object.hasOwn(all, name) && all[name]) all[name].open(location.hash);
  };
  addEventListener("hashchange", follow);
  follow();
  if (all.samples) charts.whenChosen((step, title) => all.samples.show(step, all.samples.policies.find((name) => name && title.startsWith(`${name}: `)) || ""));
})();
