// A game for two in C++: nim HOST:PORT [EPISODES]
//
// It plays 16 games of Nim at once and lets a gateway of Juggler act for both players. Take it as a
// template for a game in turns: each message has rows for the players who are on turn or whose game
// has ended, and nothing for the others. A row's reward is all that its player got since its last
// action.

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "juggler/runtime/wire/v1/simulator.grpc.pb.h"

namespace sim = juggler::simulator::v1;
namespace wire = juggler::v1;

constexpr int kGames = 16;
constexpr int kPlayers = 2;
constexpr std::chrono::seconds kPatience{60};  // until a gateway answers

// -- the game: take 1 to 3 sticks in turn; taking the last wins ----------------------

// The run's numbers for a game, such as those of a curriculum.
using Parameters = google::protobuf::Map<std::string, double>;

struct Game {
  int sticks, turn;                       // who moves next
  bool moved[kPlayers] = {false, false};  // who has moved in this game

  Game(uint64_t seed, const Parameters& parameters) {
    std::mt19937 rng(static_cast<uint32_t>(seed));  // equal seeds give equal games
    const int most = parameters.contains("sticks") ? parameters.at("sticks") : 12;
    sticks = 5 + rng() % (most - 4);
    turn = rng() % 2;
  }
};

// -- messages: arrays as little-endian bytes -------------------------------------------------------

void AppendFloat(std::string* data, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  for (int shift = 0; shift < 32; shift += 8) data->push_back(static_cast<char>(bits >> shift));
}

int64_t ReadInt64(const std::string& data, size_t index) {
  uint64_t bits = 0;
  for (int i = 7; i >= 0; --i) bits = bits << 8 | static_cast<uint8_t>(data[8 * index + i]);
  return static_cast<int64_t>(bits);
}

// What a message says of one player, row by row.
struct PlayerRows {
  sim::Rows rows;
  std::string observations;

  void Add(int environment, const Game& game, float reward, bool terminated, bool paused) {
    rows.add_environments(environment);
    rows.add_rewards(reward);
    rows.add_terminated(terminated);
    rows.add_paused(paused);
    AppendFloat(&observations, game.sticks / 12.0f);  // of a paused row they are ignored
    AppendFloat(&observations, (game.sticks % 4) / 4.0f);
  }
};

// The same for both players: two numbers from 0 to 1, and one of three actions.
sim::FromSimulator MakeHello() {
  sim::FromSimulator message;
  sim::Hello* hello = message.mutable_hello();
  hello->set_protocol_min(1);
  hello->set_protocol_max(1);
  hello->set_client("Nim (C++)");
  hello->set_mode(sim::REMOTE_INFERENCE);
  hello->set_environments(kGames);
  for (int player = 0; player < kPlayers; ++player) {
    sim::Agent* agent = hello->add_agents();
    agent->set_id("player_" + std::to_string(player));
    wire::BoxSpace* box = agent->mutable_observation_space()->mutable_box();
    box->add_shape(2);
    box->set_dtype(wire::DTYPE_FLOAT32);
    box->add_low(0);
    box->add_high(1);
    wire::DiscreteSpace* discrete = agent->mutable_action_space()->mutable_discrete();
    discrete->set_n(3);
    discrete->set_dtype(wire::DTYPE_INT64);
  }
  return message;
}

// -- the session -----------------------------------------------------------------------------------

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// With TLS, both sides show a certificate: of a directory that `juggler certs` has made.
std::shared_ptr<grpc::ChannelCredentials> Credentials() {
  const char* directory = std::getenv("JUGGLER_TLS");
  if (directory == nullptr) return grpc::InsecureChannelCredentials();
  const std::string base = std::string(directory) + "/";
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = ReadFile(base + "ca.pem");
  options.pem_private_key = ReadFile(base + "key.pem");
  options.pem_cert_chain = ReadFile(base + "cert.pem");
  return grpc::SslCredentials(options);
}

// Carries out a player's move, and adds the rows that follow from it. Returns whether it ended the
// game. The next one has a seed of its own.
bool Move(std::vector<PlayerRows>* rows, int environment, Game* game, int64_t action,
          uint64_t* seed, const Parameters& parameters) {
  const int player = game->turn;
  game->sticks = std::max<int>(0, game->sticks - static_cast<int>(action) - 1);
  game->moved[player] = true;
  game->turn = 1 - player;
  if (game->sticks > 0) {
    (*rows)[1 - player].Add(environment, *game, 0, false, false);
    return false;
  }
  const Game ended = *game;
  *seed += kGames;
  *game = Game(*seed, parameters);
  for (int each = 0; each < kPlayers; ++each) {
    const bool paused = game->turn != each;  // it has no turn yet in the next game
    if (ended.moved[each]) {
      (*rows)[each].Add(environment, *game, each == player ? 1 : -1, true, paused);
    } else if (!paused) {
      (*rows)[each].Add(environment, *game, 0, false, false);
    }
  }
  return true;
}

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: nim HOST:PORT [EPISODES]\n";
    return 2;
  }
  const long most = argc > 2 ? std::atol(argv[2]) : std::numeric_limits<long>::max();
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);  // dial directly, on loopback too
  arguments.SetMaxReceiveMessageSize(64 << 20);  // as large as a gateway's messages may be
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 20000);  // so that a dead connection is noticed
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // while it waits for an answer, too
  auto channel = grpc::CreateCustomChannel(argv[1], Credentials(), arguments);
  // The run may still be starting.
  if (!channel->WaitForConnected(std::chrono::system_clock::now() + kPatience)) {
    std::cerr << "no gateway answers at " << argv[1] << "; do both sides use TLS, or neither?\n";
    return 1;
  }
  auto stub = sim::Simulator::NewStub(channel);
  grpc::ClientContext context;
  // If the run has a token, each call must carry it.
  if (const char* token = std::getenv("JUGGLER_TOKEN")) {
    context.AddMetadata("authorization", std::string("Bearer ") + token);
  }
  auto stream = stub->Session(&context);
  stream->Write(MakeHello());

  std::vector<Game> games;
  std::vector<uint64_t> seeds(kGames);  // of these games
  Parameters parameters;
  sim::FromSimulator message;
  sim::ToSimulator answer;
  uint64_t seq = 0;
  long played = 0;
  bool good = true;
  while (stream->Read(&answer)) {
    if (answer.has_error()) {
      std::cout << sim::Error::Code_Name(answer.error().code()) << ": "
                << answer.error().message() << std::endl;
      good = answer.error().code() == sim::Error::ENDED;
      continue;
    }
    if (answer.has_notice()) {
      std::cout << answer.notice().text() << std::endl;
      continue;
    }
    std::vector<PlayerRows> rows(kPlayers);
    if (answer.has_actions()) {
      // They come when they have changed.
      if (!answer.actions().parameters().empty()) parameters = answer.actions().parameters();
      for (int k = 0; k < answer.actions().agents_size(); ++k) {
        const sim::Rows& asked = message.steps().agents(k);
        const std::string& actions = answer.actions().agents(k).actions(0).data();
        for (int at = 0; at < asked.environments_size(); ++at) {
          const int i = asked.environments(at);
          if (asked.paused(at)) continue;
          const int64_t action = ReadInt64(actions, at);
          played += Move(&rows, i, &games[i], action, &seeds[i], parameters);
        }
      }
    } else {  // it is the Welcome, before any action
      parameters = answer.welcome().parameters();
      for (int i = 0; i < kGames; ++i) {
        seeds[i] = answer.welcome().seed() + i;
        games.emplace_back(seeds[i], parameters);
        rows[games[i].turn].Add(i, games[i], 0, false, false);
      }
    }
    message.Clear();
    if (played >= most) {
      std::cout << "played " << played << " games" << std::endl;
      message.mutable_goodbye();
      stream->Write(message);
      stream->WritesDone();
      continue;
    }
    for (int player = 0; player < kPlayers; ++player) {
      const int count = rows[player].rows.environments_size();
      if (count == 0) continue;
      sim::Rows* part = message.mutable_steps()->add_agents();
      *part = rows[player].rows;
      part->set_agent(player);
      sim::NamedTensor* tensor = part->add_observations();
      tensor->set_dtype(wire::DTYPE_FLOAT32);
      tensor->add_shape(count);
      tensor->add_shape(2);
      tensor->set_data(rows[player].observations);
    }
    message.mutable_steps()->set_seq(++seq);
    stream->Write(message);
  }
  const grpc::Status status = stream->Finish();
  if (!status.ok()) std::cerr << status.error_message() << std::endl;
  return good && status.ok() ? 0 : 1;
}
