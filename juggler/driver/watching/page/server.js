// Asks the server, with the token if it wants one.

const KEPT = "juggler-token"; // in this tab alone

export class NotAdmitted extends Error {}

// The server is there, and does not answer as it should.
export class BadAnswer extends Error {}

export async function ask(path, parameters = {}) {
  const answer = await request(path, parameters);
  return answer.json().catch((error) => {
    throw error instanceof SyntaxError ? new BadAnswer("what came is no JSON") : error;
  });
}

export async function askForFile(path, parameters) {
  const answer = await request(path, parameters);
  return URL.createObjectURL(await answer.blob());
}

export const keepToken = (token) => sessionStorage.setItem(KEPT, token);

async function request(path, parameters) {
  const token = sessionStorage.getItem(KEPT);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const query = new URLSearchParams(parameters).toString();
  const answer = await fetch(query ? `${path}?${query}` : path, { headers, cache: "no-store" });
  if (answer.status === 401) throw new NotAdmitted(token ? "This is not the token." : "");
  if (!answer.ok) {
    const said = await answer.json().catch(() => ({}));
    throw new BadAnswer(said.error || `the server answered with ${answer.status}`);
  }
  return answer;
}
