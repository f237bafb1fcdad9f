// An eval program as libgetp's users have it: it owns every struct, knows the
// library only by the three functions that getp_eval.cpp declares, and times
// them. Next to it stands a baseline, to compare the answers with.
//
//     eval MODEL [-m getp|baseline] -i IN -o OUT [-n STEPS] [-t TEMPERATURE]
//          [-p TOPP] [-s SEED] [-z TOKENIZER]
//
// IN: the number of requests, then one request per line. OUT: one line of
// token ids per request.

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
    int steps = 1024;  // 0: as many as the model has positions
    float temperature = 0.0f;
    float topp = 0.9f;
    unsigned long long seed = 0;  // 0: from the clock
};

static const char kUsage[] =
    "usage: eval MODEL [-m getp|baseline] -i IN -o OUT [-n STEPS] [-t TEMPERATURE]\n"
    "            [-p TOPP] [-s SEED] [-z TOKENIZER]\n";

static unsigned long long parse_unsigned(char option, const char *text, unsigned long long max) {
    char *end = nullptr;
    errno = 0;
    const unsigned long long value = std::strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || *end != '\0' || errno != 0 || value > max) {
        fail(std::string("-") + option + " needs a whole number up to " + std::to_string(max) +
             ", not '" + text + "'");
    }
    return value;
}

static float parse_float(char option, const char *text) {
    char *end = nullptr;
    const float value = std::strtof(text, &end);
    if (end == text || *end != '\0' || !(value >= 0.0f) || std::isinf(value)) {
        fail(std::string("-") + option + " needs a number from 0 up, not '" + text + "'");
    }
    return value;
}

static void set_option(Arguments *arguments, int option) {
    const char name = static_cast<char>(option);
    switch (option) {
        case 'm': arguments->mode = optarg; break;
        case 'i': arguments->input = optarg; break;
        case 'o': arguments->output = optarg; break;
        case 'n': arguments->steps = static_cast<int>(parse_unsigned(name, optarg, INT_MAX)); break;
        case 't': arguments->temperature = parse_float(name, optarg); break;
        case 'p': arguments->topp = parse_float(name, optarg); break;
        case 's': arguments->seed = parse_unsigned(name, optarg, ULLONG_MAX); break;
        case 'z': arguments->tokenizer = optarg; break;
        default: fail("bad option");
    }
}

// The model stands before the options, where POSIX getopt would stop.
static Arguments parse_arguments(int argc, char **argv) {
    Arguments arguments;
    if (argc < 2 || argv[1][0] == '-') fail("the model comes first");
    arguments.model = argv[1];
    optind = 2;
    for (int option; (option = getopt(argc, argv, "m:i:o:n:t:p:s:z:")) != -1;) {
        set_option(&arguments, option);
    }
    if (optind < argc) fail(std::string("unexpected '") + argv[optind] + "'");
    if (arguments.mode != "getp" && arguments.mode != "baseline") fail("-m is getp or baseline");
    if (arguments.input.empty() || arguments.output.empty()) fail("-i and -o are needed");
    if (arguments.seed == 0) arguments.seed = static_cast<unsigned long long>(std::time(nullptr));
    return arguments;
}

// The caches end with seq_len, so no request can go on behind it.
static int limit_steps(int steps, int seq_len) {
    if (steps > seq_len) {
        std::fprintf(stderr, "eval: %d steps cut to the model's %d\n", steps, seq_len);
    }
    return steps == 0 ? seq_len : std::min(steps, seq_len);
}

static void baseline(Transformer *transformer, Tokenizer *tokenizer, Sampler *sampler,
                     Requests *requests, const std::string &output_path) {
    long long n_tokens = 0;
    const double elapsed_s = seconds_of(
        [&] { n_tokens = baseline_inference(transformer, tokenizer, sampler, requests); });
    print_throughput(elapsed_s, n_tokens);
    write_answers(*requests, output_path);
}

// Everything the program owns, let go of on failure too.
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
    build_transformer(&e.transformer, arguments.model);
    const Config &config = e.transformer.config;
    build_tokenizer(&e.tokenizer, arguments.tokenizer, config.vocab_size);
    build_sampler(&e.sampler, config.vocab_size, arguments.temperature, arguments.topp,
                  arguments.seed);
    read_requests(&e.requests, arguments.input, e.tokenizer.max_token_length,
                  limit_steps(arguments.steps, config.seq_len));

    const auto run = arguments.mode == "getp" ? getp : baseline;
    run(&e.transformer, &e.tokenizer, &e.sampler, &e.requests, arguments.output);
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
