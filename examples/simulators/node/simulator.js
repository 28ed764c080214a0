// A simulator in JavaScript: node simulator.js HOST:PORT [EPISODES]
//
// It steps 16 environments together and lets a gateway of Juggler act in them. Take it as a
// template: only `reset` and `step` are specific to the task, which is to keep a ball on a board that
// can be tilted to the left (action 0) or to the right (action 1).

const fs = require('fs');
const path = require('path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const ENVIRONMENTS = 16;
const LONGEST = 200; // steps of an episode
const PATIENCE = 60_000; // milliseconds until a gateway answers

// -- the task ------------------------------------------------------------------------------------

// `parameters` are the run's numbers for an episode, such as those of a curriculum.
function reset(seed, parameters) {
  const random = randomFrom(seed); // equal seeds give equal episodes
  const { slope = 0.02 } = parameters;
  return { x: random() * 0.2 - 0.1, v: random() * 0.2 - 0.1, steps: 0, random, slope };
}

function step(ball, action) {
  ball.v += (action === 1 ? 0.05 : -0.05) + ball.slope * ball.x + (ball.random() - 0.5) * 0.02;
  ball.x += 0.2 * ball.v;
  ball.steps += 1;
  const terminated = Math.abs(ball.x) > 1; // it fell off
  const speed = Math.abs(ball.v); // a number for the run's metrics, info/speed
  return { reward: 1, speed, terminated, truncated: !terminated && ball.steps === LONGEST };
}

// Random numbers from 0 to 1: Tommy Ettinger's mulberry32.
function randomFrom(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

// -- messages: arrays as little-endian bytes -------------------------------------------------------

function observationsOf(balls) {
  const data = Buffer.alloc(balls.length * 2 * 4);
  balls.forEach((ball, i) => {
    data.writeFloatLE(ball.x, i * 8);
    data.writeFloatLE(ball.v, i * 8 + 4);
  });
  return [{ dtype: 'DTYPE_FLOAT32', shape: [balls.length, 2], data }];
}

// Two numbers without bounds, and one of two actions.
const agent = {
  id: 'tilter',
  observation_space: {
    box: { shape: [2], dtype: 'DTYPE_FLOAT32', low: [-Infinity], high: [Infinity] },
  },
  action_space: { discrete: { n: 2, start: 0, dtype: 'DTYPE_INT64' } },
};

// -- the session -----------------------------------------------------------------------------------

const [address, episodes = 'Infinity'] = process.argv.slice(2);
if (!address) {
  console.error('usage: node simulator.js HOST:PORT [EPISODES]');
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
let balls = [];
let seed = 0; // from the gateway
const begun = Array(ENVIRONMENTS).fill(0); // episodes
let parameters = {};
let seq = 0;
let played = 0;

stream.write({
  hello: {
    protocol_min: 1, protocol_max: 1, client: 'balance (JavaScript)', mode: 'REMOTE_INFERENCE',
    environments: ENVIRONMENTS, agents: [agent], info_names: ['speed'],
  },
});

// Each episode of each environment has a seed of its own.
const seedOf = (i) => seed + ENVIRONMENTS * begun[i] + i;

function send(rows) {
  seq += 1;
  stream.write({ steps: { seq, agents: [{ observations: observationsOf(balls), ...rows }] } });
}

// Takes actions, steps the environments, and sends the results.
function play(actions) {
  // They come when they have changed.
  if (Object.keys(actions.parameters).length) parameters = actions.parameters;
  const data = actions.agents[0].actions[0].data; // int64, one for each environment
  const results = balls.map((ball, i) => step(ball, Number(data.readBigInt64LE(i * 8))));
  // The gateway needs the final observation of a truncated episode.
  const cut = results.flatMap((result, i) => (result.truncated ? [i] : []));
  const finals = observationsOf(cut.map((i) => balls[i]));
  results.forEach((result, i) => {
    if (result.terminated || result.truncated) {
      played += 1;
      if (played % 100 === 0) console.log(`episode ${played}: ${balls[i].steps} steps`);
      begun[i] += 1;
      balls[i] = reset(seedOf(i), parameters);
    }
  });
  if (played >= Number(episodes)) {
    console.log(`played ${played} episodes`);
    stream.write({ goodbye: {} });
    stream.end();
    return;
  }
  send({
    rewards: results.map((result) => result.reward),
    infos: results.map((result) => result.speed), // one for each of the info_names
    terminated: results.map((result) => result.terminated),
    truncated: results.map((result) => result.truncated),
    ...(cut.length ? { final_rows: cut, final_observations: finals } : {}),
  });
}

stream.on('data', (message) => {
  switch (message.message) {
    case 'welcome':
      ({ seed, parameters } = message.welcome);
      balls = begun.map((_, i) => reset(seedOf(i), parameters));
      send({}); // the first observations
      break;
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
