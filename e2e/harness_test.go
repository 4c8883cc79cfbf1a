package e2e

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	_ "github.com/edgelimit/caddy-edgelimit" // so that a cached test result is of this very code
)

// caddyBinary is the Caddy under test.
var caddyBinary string

func TestMain(m *testing.M) { os.Exit(buildAndRun(m)) }

func buildAndRun(m *testing.M) int {
	dir, err := os.MkdirTemp("", "edge_limit")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	caddyBinary = filepath.Join(dir, "caddy")
	build := exec.Command("go", "build", fmt.Sprintf("-race=%t", raceDetector), "-o", caddyBinary, "../xcaddy")
	if output, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "building Caddy: %v\n%s", err, output)
		return 1
	}
	return m.Run()
}

// missing skips a test for want of something that not every machine has. Where
// CI=true nothing may be missing, and it fails.
func missing(t *testing.T, what string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatal("missing: " + what)
	}
	t.Skip("missing: " + what)
}

// tool finds a program that must be installed.
func tool(t *testing.T, name string) string {
	t.Helper()
	for _, candidate := range []string{name, "/usr/sbin/" + name} {
		if path, err := exec.LookPath(candidate); err == nil {
			return path
		}
	}
	missing(t, name+" (on Debian: apt-get install "+name+")")
	return ""
}

// needLoopbackNetwork wants all of 127.0.0.0/8 as local addresses, so that one
// machine can be several visitors.
func needLoopbackNetwork(t *testing.T) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.5:0")
	if err != nil {
		missing(t, "127.0.0.5 as a local address (Linux has all of 127.0.0.0/8)")
	}
	listener.Close()
}

// portsTaken are those that freeAddr gave away.
var portsTaken sync.Map

// freeAddr gives a local address to listen at. Its port lies below those that
// systems give to outgoing connections.
func freeAddr(t *testing.T) string {
	t.Helper()
	for range 1000 {
		port := 20000 + rand.IntN(12000)
		if _, taken := portsTaken.LoadOrStore(port, true); taken {
			continue
		}
		if listener, err := net.Listen("tcp", fmt.Sprintf(":%d", port)); err == nil {
			listener.Close()
			return fmt.Sprintf("127.0.0.1:%d", port)
		}
	}
	t.Fatal("no port is free")
	return ""
}

func portOf(addr string) string { return addr[strings.LastIndexByte(addr, ':')+1:] }

// shownOutput is how much of a process's output a failed test shows, in bytes.
const shownOutput = 10_000

// process is a program that runs until its test ends.
type process struct {
	cmd    *exec.Cmd
	output output
	ended  chan struct{}
}

// output is what a process has written so far.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// linesWith counts the lines that hold all of these words.
func (o *output) linesWith(words ...string) int {
	found := 0
	for line := range strings.Lines(o.String()) {
		holds := true
		for _, word := range words {
			holds = holds && strings.Contains(line, word)
		}
		if holds {
			found++
		}
	}
	return found
}

// start runs a program. When the test ends the process is ended, its output is
// shown if the test failed, and a panic or a data race in it fails the test.
func start(t *testing.T, env []string, name string, args ...string) *process {
	t.Helper()
	p := &process{cmd: exec.Command(name, args...), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stdout, p.cmd.Stderr = &p.output, &p.output
	if err := p.cmd.Start(); err != nil {
		t.Fatalf("starting %s: %v", name, err)
	}
	go func() {
		_ = p.cmd.Wait()
		close(p.ended)
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.ended
		for _, word := range []string{"DATA RACE", "panic"} {
			if p.output.linesWith(word) > 0 {
				t.Errorf("%s: %s", filepath.Base(name), word)
			}
		}
		if t.Failed() {
			text := p.output.String()
			t.Logf("output of %s, its last lines:\n%s", filepath.Base(name), text[max(0, len(text)-shownOutput):])
		}
	})
	return p
}

// stop asks the process to end, as a service manager does, and waits for it.
func (p *process) stop(t *testing.T) {
	t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.ended:
	case <-time.After(time.Minute):
		t.Fatal("the process did not end in time")
	}
}

// await polls until the process is ready.
func (p *process) await(t *testing.T, ready func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); {
		select {
		case <-p.ended:
			t.Fatal("the process ended before it was ready")
		case <-time.After(10 * time.Millisecond):
		}
		if ready() {
			return
		}
	}
	t.Fatal("the process was not ready in time")
}

// listens says whether somebody accepts connections there.
func listens(addr string) bool {
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

// caddy is a running Caddy.
type caddy struct {
	*process
	admin string   // where its admin endpoint listens
	home  string   // where it keeps its files
	file  string   // the Caddyfile it runs
	env   []string // what it was started with, beside the environment of the test
}

// startCaddy runs a Caddy with these global options and sites until the test
// ends.
func startCaddy(t *testing.T, globals, sites string, env ...string) *caddy {
	t.Helper()
	home := t.TempDir()
	c := &caddy{admin: freeAddr(t), home: home, file: filepath.Join(home, "Caddyfile"), env: append(homeEnv(home), env...)}
	write(t, c.file, c.caddyfile(globals, sites))
	c.start(t)
	return c
}

// start runs the Caddyfile, for the first time or again.
func (c *caddy) start(t *testing.T) {
	t.Helper()
	c.process = start(t, c.env, caddyBinary, "run", "--adapter", "caddyfile", "--config", c.file)
	c.await(t, func() bool {
		// the answer waits until the configuration has been loaded
		response, err := http.Get("http://" + c.admin + "/config/")
		return err == nil && strings.HasPrefix(string(readAll(t, response)), "{")
	})
	text, err := os.ReadFile(c.file)
	if err != nil {
		t.Fatal(err)
	}
	for _, site := range tlsSites.FindAllStringSubmatch(string(text), -1) {
		c.await(t, func() bool { return hasCertificate(site[1]) })
	}
}

// homeEnv keeps a Caddy's files in a directory of its own.
func homeEnv(home string) []string {
	return []string{"HOME=" + home, "XDG_DATA_HOME=" + home, "XDG_CONFIG_HOME=" + home}
}

func (c *caddy) caddyfile(globals, sites string) string {
	return fmt.Sprintf("{\nadmin %s\nauto_https disable_redirects\nskip_install_trust\n%s\n}\n%s\n", c.admin, globals, sites)
}

// site is a Caddyfile site over HTTP.
func site(addr, directives string) string {
	return fmt.Sprintf("http://:%s {\nbind 127.0.0.1\n%s\n}\n", portOf(addr), directives)
}

// tlsSite is a Caddyfile site for https://localhost.
func tlsSite(addr, directives string) string {
	return fmt.Sprintf("https://localhost:%s {\nbind 127.0.0.1\ntls internal\n%s\n}\n", portOf(addr), directives)
}

var tlsSites = regexp.MustCompile(`https://(localhost:\d+)`)

// hasCertificate says whether a TLS handshake succeeds there: a Caddy that has
// started may still be making its certificate.
func hasCertificate(addr string) bool {
	conn, err := tls.Dial("tcp4", addr, &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

// run runs a Caddy command beside the running one and returns what it wrote.
func (c *caddy) run(args ...string) (string, error) {
	cmd := exec.Command(caddyBinary, args...)
	cmd.Env = append(os.Environ(), c.env...)
	output, err := cmd.CombinedOutput()
	return string(output), err
}

// metric is the value of a series on /metrics, 0 if it is not there.
func (c *caddy) metric(t *testing.T, series string) float64 {
	t.Helper()
	for line := range strings.Lines(c.metrics(t)) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), series+" "); ok {
			number, err := strconv.ParseFloat(value, 64)
			if err != nil {
				t.Fatalf("metric %s: %v", series, err)
			}
			return number
		}
	}
	return 0
}

func (c *caddy) metrics(t *testing.T) string {
	t.Helper()
	response, err := http.Get("http://" + c.admin + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	return string(readAll(t, response))
}

// startNginx runs an nginx of one process, with all its files in a directory of
// its own, until the test ends. It is ready when it listens at addr.
func startNginx(t *testing.T, addr, servers string) {
	t.Helper()
	nginx := tool(t, "nginx")
	dir := t.TempDir()
	file := filepath.Join(dir, "nginx.conf")
	write(t, file, fmt.Sprintf(`
daemon off;
master_process off;
pid %[1]s/pid;
error_log stderr warn;
events { worker_connections 512; }
http {
	access_log off;
	client_body_temp_path %[1]s/body;
	proxy_temp_path %[1]s/proxy;
	fastcgi_temp_path %[1]s/fastcgi;
	uwsgi_temp_path %[1]s/uwsgi;
	scgi_temp_path %[1]s/scgi;
	keepalive_requests 1000000;
	%[2]s
}
`, dir, servers))
	p := start(t, nil, nginx, "-p", dir, "-c", file)
	p.await(t, func() bool { return listens(addr) })
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
