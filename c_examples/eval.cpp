// An evaluation program as libgetp's users have it: it owns all structs, knows
// the library only by the three functions that getp_eval.cpp declares, and times
// them. It also has a baseline, to compare the answers with.
//
//     eval MODEL [-m getp|baseline] -i IN -o OUT [-n STEPS] [-t TEMPERATURE]
//          [-p TOPP] [-s SEED] [-d own|shared] [-z TOKENIZER]
//     eval MODEL -m generate -i PROMPT [...]
//
// IN: the number of requests, then one request per line. OUT: one line of
// token ids per request. generate prints the prompt and the baseline's answer.
// -d says how the baseline draws: each request from a random state of its own, as
// the library does it, or all from one in turn, as the original does it.
// The original also has a chat mode, and its default is generate.

#include "eval_model.h"

#include "getp_run.cpp"

#include "baseline.h"

#include <ctime>

struct Arguments {
    std::string model;
    std::string mode = "getp";
    std::string input;
    std::string output;
    std::string tokenizer = "tokenizer.bin";
    int steps = 1024;  // 0 or less: the model's seq_len
    float temperature = 0.0f;
    float topp = 0.9f;
    unsigned long long seed = 0;  // 0: from the clock
    std::string draws = "own";
};

static const char kUsage[] =
    "usage: eval MODEL [-m getp|baseline] -i IN -o OUT [-n STEPS] [-t TEMPERATURE]\n"
    "            [-p TOPP] [-s SEED] [-d own|shared] [-z TOKENIZER]\n"
    "       eval MODEL -m generate -i PROMPT [...]\n"
    "defaults: -m getp, -n 1024 (0: the model's length), -t 0, -p 0.9 (also for a value\n"
    "outside 0..1), -s 0 (0: from the clock), -z tokenizer.bin; there is no chat mode\n"
    "-d, for -m baseline: each request draws from a random state of its own, as in the\n"
    "library (own, the default), or all from one in turn, as in the original (shared)\n";

// Parses values as the original does: text that is not a number is 0.
static void set_option(Arguments *arguments, int option) {
    switch (option) {
        case 'm': arguments->mode = optarg; break;
        case 'i': arguments->input = optarg; break;
        case 'o': arguments->output = optarg; break;
        case 'n': arguments->steps = std::atoi(optarg); break;
        case 't': arguments->temperature = static_cast<float>(std::atof(optarg)); break;
        case 'p': arguments->topp = static_cast<float>(std::atof(optarg)); break;
        case 's': arguments->seed = static_cast<unsigned long long>(std::atoi(optarg)); break;
        case 'd': arguments->draws = optarg; break;
        case 'z': arguments->tokenizer = optarg; break;
        default: fail("bad option");
    }
}

// Replaces values out of range as the original does. For NaN it has no answer.
static void correct_values(Arguments *arguments) {
    if (std::isnan(arguments->temperature)) fail("-t is NaN; use 0, which is greedy, or more");
    if (std::isnan(arguments->topp)) fail("-p is NaN; use a number from 0 to 1");
    if (arguments->seed == 0) arguments->seed = static_cast<unsigned>(std::time(nullptr));
    if (arguments->temperature < 0.0f) arguments->temperature = 0.0f;
    if (arguments->topp < 0.0f || arguments->topp > 1.0f) arguments->topp = 0.9f;
    arguments->steps = std::max(arguments->steps, 0);
}

// The model comes before the options, where POSIX getopt would stop.
static Arguments parse_arguments(int argc, char **argv) {
    Arguments arguments;
    if (argc < 2 || argv[1][0] == '-') fail("the model comes first");
    arguments.model = argv[1];
    optind = 2;
    for (int option; (option = getopt(argc, argv, "m:i:o:n:t:p:s:d:z:")) != -1;) {
        set_option(&arguments, option);
    }
    if (optind < argc) fail(std::string("unexpected '") + argv[optind] + "'");
    const bool generates = arguments.mode == "generate";
    if (!generates && arguments.mode != "getp" && arguments.mode != "baseline") {
        fail("-m is getp, baseline or generate");
    }
    const bool shared = arguments.draws == "shared";
    if (!shared && arguments.draws != "own") fail("-d is own or shared");
    if (shared && arguments.mode != "baseline") fail("-d shared is for -m baseline");
    if (arguments.input.empty()) fail("-i is needed");
    if (arguments.output.empty() && !generates) fail("-o is needed");
    correct_values(&arguments);
    return arguments;
}

// The KV caches have seq_len positions, so no request can have more.
static int limit_steps(int steps, int seq_len) {
    if (steps > seq_len) {
        std::fprintf(stderr, "eval: %d steps cut to the model's %d\n", steps, seq_len);
    }
    return steps == 0 ? seq_len : std::min(steps, seq_len);
}

static void baseline(Transformer *transformer, Tokenizer *tokenizer, Sampler *sampler,
                     Requests *requests, Draws draws, const std::string &output_path) {
    long long n_tokens = 0;
    const double elapsed_s = seconds_of(
        [&] { n_tokens = baseline_inference(transformer, tokenizer, sampler, requests, draws); });
    print_throughput(elapsed_s, n_tokens);
    write_answers(*requests, output_path);
}

// Everything that the program owns; freed on failure too.
struct Evaluation {
    Transformer transformer = {};
    Tokenizer tokenizer = {};
    Sampler sampler = {};
    Requests requests = {};

    Evaluation() { transformer.fd = -1; }
    Evaluation(const Evaluation &) = delete;
    Evaluation &operator=(const Evaluation &) = delete;
    ~Evaluation() {
        free_requests(&requests);
        free_sampler(&sampler);
        free_tokenizer(&tokenizer);
        free_transformer(&transformer);
    }
};

static void evaluate(const Arguments &arguments) {
    Evaluation e;
    if (arguments.mode != "generate") require_writable(arguments.output);
    build_transformer(&e.transformer, arguments.model);
    const Config &config = e.transformer.config;
    print_config(config);
    build_tokenizer(&e.tokenizer, arguments.tokenizer, config.vocab_size);
    build_sampler(&e.sampler, config.vocab_size, arguments.temperature, arguments.topp,
                  arguments.seed);
    const int steps = limit_steps(arguments.steps, config.seq_len);
    if (arguments.mode == "generate") {
        generate_text(&e.transformer, e.tokenizer, e.sampler, arguments.input, steps);
        return;
    }
    read_requests(&e.requests, arguments.input, e.tokenizer.max_token_length, steps);
    if (arguments.mode == "getp") {
        getp(&e.transformer, &e.tokenizer, &e.sampler, &e.requests, arguments.output);
        return;
    }
    const Draws draws = arguments.draws == "shared" ? Draws::kShared : Draws::kOwn;
    baseline(&e.transformer, &e.tokenizer, &e.sampler, &e.requests, draws, arguments.output);
}

int main(int argc, char **argv) {
    Arguments arguments;
    try {
        arguments = parse_arguments(argc, argv);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "eval: %s\n%s", error.what(), kUsage);
        return 2;
    }
    try {
        evaluate(arguments);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "eval: %s\n", error.what());
        return 1;
    }
    return 0;
}
