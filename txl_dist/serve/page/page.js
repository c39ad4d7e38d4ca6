// A conversation with the server that serves this page. Each turn continues from the memory of the turn before, so the
// server computes only the new tokens. Everything is inserted as text, never as markup.

const LIKELIEST = 5; // alternatives that are requested for each token
const MOST_BITS = 10; // surprise in bits from which on a token has the full colour

const find = (id) => document.getElementById(id);
const [talk, state, likeliest] = ["talk", "state", "likeliest"].map(find);
let model = null; // its name
let memory = null; // handle of the memory of the conversation so far
let request = null; // AbortController of the running turn

function headers() {
  const key = find("ask").elements.key.value;
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

function say(text, isBad = false) {
  state.textContent = text;
  state.classList.toggle("bad", isBad);
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status} ${response.statusText}`;
  }
}

async function askForModel() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) throw new Error(await messageOf(response));
  const [facts] = (await response.json()).data;
  model = facts.id;
  find("model").textContent = model;
  find("facts").textContent = factsOf(facts);
  document.title = `${model} - txl_dist`;
}

function factsOf({ parameters, num_layers, width, num_heads, memory_len, vocab_size, softmax }) {
  const number = (value) => value.toLocaleString("en");
  const several = (value, name) => `${number(value)} ${name}${value === 1 ? "" : "s"}`;
  return [
    several(parameters, "parameter"),
    several(num_layers, "layer"),
    `width ${number(width)}`,
    several(num_heads, "head"),
    `memory of ${several(memory_len, "token")}`,
    `vocabulary of ${number(vocab_size)}`,
    softmax,
  ].join(", ");
}

// Yields the JSON objects of a stream of server-sent events.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) {
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function turnOf(values, prompt) {
  const number = (name) => Number(values[name].value);
  const turn = { model, prompt, stream: true, logprobs: LIKELIEST, keep_memory: true, top_k: number("top_k") };
  for (const name of ["max_tokens", "temperature", "top_p"]) turn[name] = number(name);
  if (values.seed.value) turn.seed = number("seed");
  if (memory) turn.memory = memory;
  return turn;
}

async function goOn() {
  const prompt = find("prompt").value;
  request = new AbortController();
  setBusy(true);
  say("reading ...");
  let made = 0;
  const before = talk.childNodes.length;
  try {
    if (!model) await askForModel();
    const body = JSON.stringify(turnOf(find("ask").elements, prompt));
    const response = await fetch("v1/completions", { method: "POST", headers: headers(), body, signal: request.signal });
    if (!response.ok) {
      const remedy = response.status === 404 && memory ? " Click \"Start over\"." : "";
      throw new Error((await messageOf(response)) + remedy);
    }
    talk.append(spanOf(prompt, "asked"));
    find("prompt").value = "";
    const begun = performance.now();
    for await (const event of eventsOf(response)) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) {
        show(choice);
        made += choice.logprobs?.tokens.length ?? 0;
        if (choice.memory) memory = choice.memory.id;
        const seconds = (performance.now() - begun) / 1000;
        const speed = `${made} tokens in ${seconds.toFixed(1)} s, ${(made / seconds).toPrecision(3)} tokens/s`;
        say(speed + (choice.finish_reason ? `; ended: ${choice.finish_reason}` : ""));
      }
    }
  } catch (error) {
    const isStop = error.name === "AbortError";
    say(isStop ? "Stopped. The model does not remember the struck-out text." : error.message, !isStop);
    for (const node of [...talk.childNodes].slice(before)) node.classList.add("lost");
    find("prompt").value ||= prompt;
  } finally {
    setBusy(false);
  }
}

function setBusy(isBusy) {
  find("go").disabled = isBusy;
  find("stop").hidden = !isBusy;
  find("anew").disabled = isBusy || !talk.hasChildNodes();
  find("legend").hidden = !talk.querySelector(".token");
  if (!isBusy) request = null;
}

function spanOf(text, name) {
  const span = document.createElement("span");
  span.className = name;
  span.textContent = text;
  return span;
}

// Shows a piece of text: one element per token, or one for all if several tokens make one character.
function show({ text, logprobs }) {
  const tokens = logprobs?.tokens ?? [];
  const places = tokens.map((token, place) => placeOf(logprobs, place));
  if (tokens.join("") === text) tokens.forEach((token, place) => talk.append(tokenOf(token, [places[place]])));
  else if (text) talk.append(tokens.length ? tokenOf(text, places) : spanOf(text, ""));
}

function placeOf(logprobs, place) {
  const others = Object.entries(logprobs.top_logprobs?.[place] ?? {});
  const own = [logprobs.tokens[place], logprobs.token_logprobs[place]];
  if (!others.some(([token]) => token === own[0])) others.push(own);
  return { own, others: others.sort((a, b) => b[1] - a[1]) };
}

function tokenOf(text, places) {
  const token = spanOf(text, "token"); // no button element: a line could not break in it
  token.role = "button";
  token.tabIndex = 0;
  const bits = places.reduce((sum, { own }) => sum - own[1] / Math.LN2, 0);
  token.style.setProperty("--surprise", Math.min(1, bits / MOST_BITS).toFixed(3));
  token.title = places.map(({ own }) => percent(own[1])).join(", ");
  token.addEventListener("click", () => tell(token, places));
  token.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    tell(token, places);
  });
  return token;
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toPrecision(3)} %`;

function tell(token, places) {
  const isTold = token.getAttribute("aria-expanded") === "true";
  talk.querySelector('[aria-expanded="true"]')?.removeAttribute("aria-expanded");
  likeliest.hidden = isTold;
  if (isTold) return;
  token.setAttribute("aria-expanded", "true");
  likeliest.replaceChildren(...places.map(({ own, others }) => {
    const table = document.createElement("table");
    for (const [text, logprob] of others) {
      const row = table.insertRow();
      row.className = text === own[0] ? "chosen" : "";
      row.insertCell().textContent = JSON.stringify(text);
      row.insertCell().textContent = percent(logprob);
    }
    return table;
  }));
}

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!request) goOn();
});
find("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) find("ask").requestSubmit();
});
find("stop").addEventListener("click", () => request?.abort());
find("anew").addEventListener("click", () => {
  memory = null;
  talk.replaceChildren();
  likeliest.hidden = true;
  say("");
  setBusy(false);
  find("prompt").focus();
});
askForModel().catch((error) => say(error.message, true));
