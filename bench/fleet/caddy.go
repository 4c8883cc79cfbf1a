package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/edgelimit/caddy-edgelimit/bench/internal/process"
)

// The Caddys that are compared.
const (
	edgeLimit  = "edge_limit"
	perRequest = "redis_rate"
	noLimiter  = "no limiter" // what is left when a limiter costs nothing
)

// limit is one that both Caddys can have, perhaps several times under different
// names.
type limit struct {
	count  int
	window time.Duration
	burst  int
	times  int
}

func (l limit) String() string {
	if l == (limit{}) {
		return "none"
	}
	text := fmt.Sprintf("%.4g/s, burst %d", float64(l.count)/l.window.Seconds(), l.burst)
	if l.times > 1 {
		text = fmt.Sprintf("%d times %s", l.times, text)
	}
	return text
}

// caddy is one that runs.
type caddy struct {
	name    string
	command *exec.Cmd
	log     string // the file that its error output goes to
	metrics string // where they are
}

const trusted = "trusted_proxies static 127.0.0.1/32\n"

// config is a Caddyfile. In both Caddys the client stands in X-Forwarded-For.
func (b *bench) config(name string, l limit, home string) string {
	var global, site string
	switch name {
	case edgeLimit:
		global = fmt.Sprintf("edge_limit {\npepper 0123456789abcdef0123456789abcdef\nclient {\n"+trusted+"}\nstore redis {\naddress %s\ntimeout %s\n}\n}\n",
			b.ports.redis, b.timeout)
		site = "edge_limit {\n"
		for n := range l.times {
			site += fmt.Sprintf("limit each%d %d/%s {\nburst %d\n}\n", n, l.count, l.window, l.burst)
		}
		site += "}\n"
	case perRequest:
		global = "servers {\n" + trusted + "}\n"
		site = fmt.Sprintf("per_request %s %d %d %s %d %d\n", b.ports.redis, b.pool, l.count, l.window, l.burst, l.times)
	}
	return fmt.Sprintf("{\nadmin off\nauto_https off\npersist_config off\ngrace_period 1s\nstorage file_system %s\n%s}\n"+
		"http://:%d {\nbind 127.0.0.1\n%srespond ok\n}\nhttp://:%d {\nbind 127.0.0.1\nmetrics\n}\n",
		home, global, b.ports.caddy.Port(), site, b.ports.metrics.Port())
}

// start starts a Caddy on its core, and waits until it answers and has Redis.
func (b *bench) start(name string, l limit) (*caddy, error) {
	home, err := os.MkdirTemp(b.directory, "caddy")
	if err != nil {
		return nil, fmt.Errorf("making a directory: %w", err)
	}
	path := filepath.Join(home, "Caddyfile")
	if err := os.WriteFile(path, []byte(b.config(name, l, home)), 0o600); err != nil {
		return nil, fmt.Errorf("writing a Caddyfile: %w", err)
	}
	c := &caddy{name: name, log: filepath.Join(home, "log"), metrics: "http://" + b.ports.metrics.String() + "/"}
	output, err := os.Create(c.log)
	if err != nil {
		return nil, fmt.Errorf("making the log: %w", err)
	}
	defer output.Close()
	c.command = exec.CommandContext(context.Background(), b.programs[name], "run", "--config", path, "--adapter", "caddyfile")
	c.command.Env = append(os.Environ(), "GOGC=100", "HOME="+home, "XDG_DATA_HOME="+home, "XDG_CONFIG_HOME="+home)
	if b.maxProcs > 0 {
		c.command.Env = append(c.command.Env, "GOMAXPROCS="+strconv.Itoa(b.maxProcs))
	}
	c.command.Stdout, c.command.Stderr = output, output
	if _, err := process.Start(c.command, b.caddyCPU); err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	if err := b.await(c); err != nil {
		process.Stop(c.command)
		text, _ := os.ReadFile(c.log)
		return nil, fmt.Errorf("starting %s: %w\n%s", name, err, text)
	}
	return c, nil
}

func (b *bench) await(c *caddy) error {
	if err := process.AwaitListening(b.ports.caddy); err != nil {
		return err
	}
	if c.name != edgeLimit {
		return nil
	}
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		text, err := c.readMetrics()
		if err == nil && strings.Contains(text, `caddy_edge_limit_store_state{state="connected"} 1`) {
			return nil
		}
	}
	return fmt.Errorf("it does not reach Redis")
}

func (c *caddy) readMetrics() (string, error) {
	response, err := http.Get(c.metrics)
	if err != nil {
		return "", fmt.Errorf("reading the metrics of %s: %w", c.name, err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return "", fmt.Errorf("reading the metrics of %s: %w", c.name, err)
	}
	return string(text), nil
}

var (
	storeErrors  = regexp.MustCompile(`(?m)^caddy_edge_limit_store_errors_total\{kind="[^"]*"\} (\d+)`)
	storeAnswers = regexp.MustCompile(`(?m)^caddy_edge_limit_store_seconds_count (\d+)`)
)

// asked is how many requests edge_limit has asked Redis about up to now, and how
// many of its calls failed.
func (c *caddy) asked() (asked, failed int, err error) {
	if c.name != edgeLimit {
		return 0, 0, nil
	}
	text, err := c.readMetrics()
	if err != nil {
		return 0, 0, err
	}
	for _, match := range storeErrors.FindAllStringSubmatch(text, -1) {
		n, _ := strconv.Atoi(match[1])
		failed += n
	}
	match := storeAnswers.FindStringSubmatch(text)
	if match == nil {
		return 0, 0, fmt.Errorf("the metrics of %s do not say how often it asked", c.name)
	}
	asked, _ = strconv.Atoi(match[1])
	return asked, failed, nil
}

// complaint is a line of the log, beyond what was there before, that makes a
// measurement one of something else: requests were answered with an error, or
// decided without Redis.
func (c *caddy) complaint(before int) (line string, length int, err error) {
	text, err := os.ReadFile(c.log)
	if err != nil {
		return "", 0, fmt.Errorf("reading the log of %s: %w", c.name, err)
	}
	for line := range strings.Lines(string(text[before:])) {
		if strings.Contains(line, `"level":"error"`) || strings.Contains(line, "the store cannot be used") {
			return strings.TrimSpace(line), len(text), nil
		}
	}
	return "", len(text), nil
}
