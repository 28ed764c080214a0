// A game for two in JavaScript: node nim.js HOST:PORT [EPISODES]
//
// It plays 16 games of Nim at once and lets a gateway of Juggler act for both players. Take it as a
// template for a game in turns: each message has rows for the players who are on turn or whose game
// has ended, and nothing for the others. A row's reward is all that its player got since its last
// action.

const fs = require('fs');
const path = require('path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const GAMES = 16;
const PLAYERS = ['player_0', 'player_1'];
const PATIENCE = 60_000; // milliseconds until a gateway answers

// -- the game: take 1 to 3 sticks in turn; taking the last wins ----------------------

// `parameters` are the run's numbers for a game, such as those of a curriculum.
function begin(seed, { sticks = 12 }) {
  const random = Math.imul(seed, 0x9e3779b1) >>> 8; // equal seeds give equal games
  return {
    sticks: 5 + random % (Math.floor(sticks) - 4),
    turn: (random >>> 16) % 2, // who moves next
    moved: [false, false], // who has moved in this game
  };
}

const observe = (game) => [game.sticks / 12, (game.sticks % 4) / 4];

// -- messages: arrays as little-endian bytes -------------------------------------------------------

function floats(rows) {
  const data = Buffer.alloc(rows.length * 2 * 4);
  rows.flat().forEach((value, i) => data.writeFloatLE(value, i * 4));
  return [{ dtype: 'DTYPE_FLOAT32', shape: [rows.length, 2], data }];
}

const agentOf = (id) => ({
  id,
  observation_space: { box: { shape: [2], dtype: 'DTYPE_FLOAT32', low: [0], high: [1] } },
  action_space: { discrete: { n: 3, start: 0, dtype: 'DTYPE_INT64' } },
});

// What a message says of each player, row by row.
const emptyRows = () => PLAYERS.map((_, agent) => (
  { agent, environments: [], rewards: [], terminated: [], paused: [], shown: [] }
));

function addRow(rows, environment, game, { reward = 0, terminated = false, paused = false }) {
  rows.environments.push(environment);
  rows.rewards.push(reward);
  rows.terminated.push(terminated);
  rows.paused.push(paused);
  rows.shown.push(observe(game)); // of a paused row it is ignored
}

// -- the session -----------------------------------------------------------------------------------

const [address, episodes = 'Infinity'] = process.argv.slice(2);
if (!address) {
  console.error('usage: node nim.js HOST:PORT [EPISODES]');
  process.exit(2);
}
const protos = process.env.JUGGLER_PROTOS || path.join(__dirname, '../../../proto');
const definition = loader.loadSync('juggler/runtime/wire/v1/simulator.proto', {
  includeDirs: [protos], keepCase: true, longs: Number, enums: String, defaults: true, oneofs: true,
});
const { Simulator } = grpc.loadPackageDefinition(definition).juggler.simulator.v1;

// With TLS, both sides show a certificate: of a directory that `juggler certs` has made.
function credentials() {
  const directory = process.env.JUGGLER_TLS;
  if (!directory) return grpc.credentials.createInsecure();
  const read = (name) => fs.readFileSync(path.join(directory, `${name}.pem`));
  return grpc.credentials.createSsl(read('ca'), read('key'), read('cert'));
}

// If the run has a token, each call must carry it.
const metadata = new grpc.Metadata({ waitForReady: true });
if (process.env.JUGGLER_TOKEN) metadata.set('authorization', `Bearer ${process.env.JUGGLER_TOKEN}`);

const client = new Simulator(address, credentials(), {
  'grpc.max_reconnect_backoff_ms': 1000,
  'grpc.enable_http_proxy': 0, // a gateway is dialed directly, on loopback too
  'grpc.max_receive_message_length': 64 << 20, // as large as a gateway's messages may be
  'grpc.keepalive_time_ms': 20_000, // so that a dead connection is noticed
});
client.waitForReady(Date.now() + PATIENCE, (error) => { // the run may still be starting
  if (!error) return;
  console.error(`no gateway answers at ${address}; do both sides use TLS, or neither?`);
  process.exit(1);
});
const stream = client.Session(metadata);
const begun = Array(GAMES).fill(0); // games that have ended
let games = [];
let seed = 0; // from the gateway
let parameters = {};
let sent = []; // the rows of the last message
let seq = 0;
let played = 0;

stream.write({
  hello: {
    protocol_min: 1, protocol_max: 1, client: 'Nim (JavaScript)', mode: 'REMOTE_INFERENCE',
    environments: GAMES, agents: PLAYERS.map(agentOf),
  },
});

// Each game has a seed of its own.
const next = (i) => begin(seed + GAMES * begun[i] + i, parameters);

function send(rows) {
  sent = rows.filter((each) => each.environments.length);
  seq += 1;
  const agents = sent.map(({ shown, ...each }) => ({ ...each, observations: floats(shown) }));
  stream.write({ steps: { seq, agents } });
}

// Carries out a player's move, and adds the rows that follow from it.
function move(rows, i, action) {
  const player = games[i].turn;
  games[i].sticks = Math.max(0, games[i].sticks - action - 1);
  games[i].moved[player] = true;
  games[i].turn = 1 - player;
  if (games[i].sticks > 0) {
    addRow(rows[1 - player], i, games[i], {});
    return;
  }
  played += 1;
  const { moved } = games[i];
  begun[i] += 1;
  games[i] = next(i);
  PLAYERS.forEach((_, each) => {
    const paused = games[i].turn !== each; // it has no turn yet in the next game
    const ended = { reward: each === player ? 1 : -1, terminated: true, paused };
    if (moved[each]) addRow(rows[each], i, games[i], ended);
    else if (!paused) addRow(rows[each], i, games[i], {});
  });
}

function play(answer) {
  // They come when they have changed.
  if (Object.keys(answer.parameters).length) parameters = answer.parameters;
  const rows = emptyRows();
  answer.agents.forEach(({ actions }, k) => {
    const { data } = actions[0]; // int64, one for each row that was sent
    sent[k].environments.forEach((i, at) => {
      if (!sent[k].paused[at]) move(rows, i, Number(data.readBigInt64LE(at * 8)));
    });
  });
  if (played >= Number(episodes)) {
    console.log(`played ${played} games`);
    stream.write({ goodbye: {} });
    stream.end();
    return;
  }
  send(rows);
}

stream.on('data', (message) => {
  switch (message.message) {
    case 'welcome': {
      ({ seed, parameters } = message.welcome);
      games = begun.map((_, i) => next(i));
      const rows = emptyRows();
      games.forEach((game, i) => addRow(rows[game.turn], i, game, {}));
      send(rows);
      break;
    }
    case 'actions':
      play(message.actions);
      break;
    case 'error':
      console.log(`${message.error.code}: ${message.error.message}`);
      process.exitCode = message.error.code === 'ENDED' ? 0 : 1;
      break;
    default: // a notice, for information
      console.log(message[message.message].text);
  }
});
stream.on('error', (error) => {
  console.error(error.message);
  process.exitCode = 1;
});
stream.on('end', () => process.exit());
