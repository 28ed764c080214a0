// A simulator in C++: simulator HOST:PORT [EPISODES]
//
// It steps 16 environments together and lets a gateway of Juggler act in them. Take it as a
// template: only `CartPole` is specific to the task.

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cmath>
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

constexpr int kEnvironments = 16;
constexpr int kLongest = 500;  // steps of an episode
constexpr std::chrono::seconds kPatience{60};  // until a gateway answers

// -- the task ------------------------------------------------------------------------------------

// The run's numbers for an episode, such as those of a curriculum.
using Parameters = google::protobuf::Map<std::string, double>;

// A pole stands on a cart that is pushed to the left (action 0) or to the right (action 1), as in
// Gymnasium's CartPole-v1: Barto, Sutton and Anderson, 1983. Metres, radians, seconds, newtons.
struct CartPole {
  float x = 0, speed = 0, angle = 0, turn = 0, gravity = 9.8f;
  int steps = 0;

  CartPole(uint64_t seed, const Parameters& parameters) {
    std::mt19937 rng(static_cast<uint32_t>(seed));  // equal seeds give equal episodes
    std::uniform_real_distribution<float> about_zero(-0.05f, 0.05f);
    for (float* each : {&x, &speed, &angle, &turn}) *each = about_zero(rng);
    if (parameters.contains("gravity")) gravity = static_cast<float>(parameters.at("gravity"));
  }

  void Step(int64_t action) {
    const float pole = 0.1f, all = 1.1f, half = 0.5f, tick = 0.02f;
    const float sine = std::sin(angle), cosine = std::cos(angle);
    const float push = ((action == 1 ? 10.0f : -10.0f) + pole * half * turn * turn * sine) / all;
    const float turning = (gravity * sine - cosine * push) /
                          (half * (4.0f / 3.0f - pole * cosine * cosine / all));
    const float acceleration = push - pole * half * turning * cosine / all;
    x += tick * speed;
    speed += tick * acceleration;
    angle += tick * turn;
    turn += tick * turning;
    steps += 1;
  }
  bool terminated() const { return std::fabs(x) > 2.4f || std::fabs(angle) > 0.2094395f; }
  bool truncated() const { return !terminated() && steps == kLongest; }
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

void Describe(const std::vector<CartPole>& poles, sim::NamedTensor* tensor) {
  tensor->set_dtype(wire::DTYPE_FLOAT32);
  tensor->add_shape(poles.size());
  tensor->add_shape(4);
  for (const CartPole& pole : poles) {
    for (float value : {pole.x, pole.speed, pole.angle, pole.turn}) {
      AppendFloat(tensor->mutable_data(), value);
    }
  }
}

// Four numbers without bounds, and one of two actions.
sim::FromSimulator MakeHello() {
  sim::FromSimulator message;
  sim::Hello* hello = message.mutable_hello();
  hello->set_protocol_min(1);
  hello->set_protocol_max(1);
  hello->set_client("CartPole (C++)");
  hello->set_mode(sim::REMOTE_INFERENCE);
  hello->set_environments(kEnvironments);
  hello->add_info_names("speed");  // a number for the run's metrics, info/speed
  sim::Agent* agent = hello->add_agents();
  agent->set_id("cart");
  wire::BoxSpace* box = agent->mutable_observation_space()->mutable_box();
  box->add_shape(4);
  box->set_dtype(wire::DTYPE_FLOAT32);
  box->add_low(-std::numeric_limits<double>::infinity());
  box->add_high(std::numeric_limits<double>::infinity());
  wire::DiscreteSpace* discrete = agent->mutable_action_space()->mutable_discrete();
  discrete->set_n(2);
  discrete->set_dtype(wire::DTYPE_INT64);
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

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: simulator HOST:PORT [EPISODES]\n";
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

  std::vector<CartPole> poles;
  std::vector<uint64_t> seeds(kEnvironments);  // of the next episodes
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
    message.Clear();
    sim::Rows* rows = message.mutable_steps()->add_agents();
    if (answer.has_welcome()) {  // before any action
      parameters = answer.welcome().parameters();
      for (int i = 0; i < kEnvironments; ++i) {
        seeds[i] = answer.welcome().seed() + i;
        poles.emplace_back(seeds[i], parameters);
      }
    } else {
      // They come when they have changed.
      if (!answer.actions().parameters().empty()) parameters = answer.actions().parameters();
      const std::string& actions = answer.actions().agents(0).actions(0).data();
      std::vector<CartPole> cut;
      for (int i = 0; i < kEnvironments; ++i) {
        CartPole& pole = poles[i];
        pole.Step(ReadInt64(actions, i));
        rows->add_rewards(1);
        rows->add_infos(std::fabs(pole.speed));  // one for each of the info_names
        rows->add_terminated(pole.terminated());
        rows->add_truncated(pole.truncated());
        if (pole.truncated()) {  // the gateway needs its final observation
          rows->add_final_rows(i);
          cut.push_back(pole);
        }
        if (pole.terminated() || pole.truncated()) {
          if (++played % 100 == 0) {
            std::cout << "episode " << played << ": " << pole.steps << " steps" << std::endl;
          }
          seeds[i] += kEnvironments;  // each episode of each environment has its own
          pole = CartPole(seeds[i], parameters);
        }
      }
      if (!cut.empty()) Describe(cut, rows->add_final_observations());
    }
    if (played >= most) {
      std::cout << "played " << played << " episodes" << std::endl;
      message.Clear();
      message.mutable_goodbye();
      stream->Write(message);
      stream->WritesDone();
      continue;
    }
    Describe(poles, rows->add_observations());
    message.mutable_steps()->set_seq(++seq);
    stream->Write(message);
  }
  const grpc::Status status = stream->Finish();
  if (!status.ok()) std::cerr << status.error_message() << std::endl;
  return good && status.ok() ? 0 : 1;
}
