// Asks the gateway. The token is this tab's; whatever else goes wrong is said in one line and tried again by the next question.
const KEY = "towline-token";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const token = {
  get: () => {
    try {
      return sessionStorage.getItem(KEY) ?? "";
    } catch {
      return token.kept ?? "";
    }
  },
  set: (value) => {
    token.kept = value;
    try {
      sessionStorage.setItem(KEY, value);
    } catch {
      // Kept in the page alone.
    }
  },
};
export const setToken = token.set;

export async function ask(path, query = {}, signal = undefined) {
  const url = new URL(`api/${path}`, document.baseURI.replace(/#.*$/, ""));
  for (const [name, value] of Object.entries(query)) if (value !== "" && value !== null && value !== undefined) url.searchParams.set(name, value);
  const headers = token.get() ? { Authorization: `Bearer ${token.get()}` } : {};
  let response;
  try {
    response = await fetch(url, { headers, signal, credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The gateway doesn't answer: it has ended with its run, or is away. Of a run that has ended, `towline ui RUN` shows the same.");
  }
  const text = await response.text();
  let body;
  try {
    body = JSON.parse(text);
  } catch {
    throw new Refused(response.status, `The gateway's answer (${response.status}) can't be read.`);
  }
  if (!response.ok) throw new Refused(response.status, body.error?.message ?? body.message ?? `status ${response.status}`);
  return body;
}
