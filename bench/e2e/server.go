package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"time"

	"github.com/edgelimit/caddy-edgelimit/bench/internal/process"
)

// serverKind is a program under test and how it is set up.
type serverKind struct {
	name    string
	program string               // bare, nothing, ours or nginx
	options string               // lines of Caddy's global options
	config  string               // the site's directives, or nginx's location
	status  string               // that it answers with
	request func() func() []byte // makes the maker of what is sent to it; nil: directClient
}

// server is one that runs.
type server struct {
	serverKind
	address netip.AddrPort
	command *exec.Cmd
	log     string // the file that its error output goes to
}

// startServer starts a server on one core, and waits until it answers. gogc is
// Go's setting for when to collect garbage.
func startServer(kind serverKind, programs map[string]string, directory string, cpu, gogc int) (*server, error) {
	address, err := process.FreeAddress()
	if err != nil {
		return nil, err
	}
	s := &server{serverKind: kind, address: address}
	home, err := os.MkdirTemp(directory, "server")
	if err != nil {
		return nil, fmt.Errorf("making a directory: %w", err)
	}
	if kind.program == "nginx" {
		err = s.prepareNginx(programs["nginx"], home)
	} else {
		err = s.prepareCaddy(programs[kind.program], home, gogc)
	}
	if err != nil {
		return nil, err
	}
	s.log = filepath.Join(home, "log")
	output, err := os.Create(s.log)
	if err != nil {
		return nil, fmt.Errorf("making the log: %w", err)
	}
	defer output.Close()
	s.command.Stdout, s.command.Stderr = output, output
	if _, err := process.Start(s.command, cpu); err != nil {
		return nil, fmt.Errorf("starting %s: %w", kind.name, err)
	}
	if err := process.AwaitListening(s.address); err != nil {
		s.stop()
		text, _ := os.ReadFile(s.log)
		return nil, fmt.Errorf("starting %s: %w\n%s", kind.name, err, text)
	}
	return s, nil
}

func (s *server) prepareCaddy(program, home string, gogc int) error {
	config := fmt.Sprintf("{\n\tadmin off\n\tauto_https off\n\tpersist_config off\n\tgrace_period 1s\n\tstorage file_system %s\n%s}\n"+
		"http://:%d {\n\tbind %s\n%s\n}\n", home, s.options, s.address.Port(), s.address.Addr(), s.config)
	path := filepath.Join(home, "Caddyfile")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		return fmt.Errorf("writing a Caddyfile: %w", err)
	}
	s.command = exec.CommandContext(context.Background(), program, "run", "--config", path, "--adapter", "caddyfile")
	s.command.Env = append(os.Environ(), "GOMAXPROCS=1", "GODEBUG=gctrace=1", fmt.Sprintf("GOGC=%d", gogc),
		"HOME="+home, "XDG_DATA_HOME="+home, "XDG_CONFIG_HOME="+home)
	return nil
}

func (s *server) prepareNginx(program, home string) error {
	config := fmt.Sprintf(`
daemon off; master_process off; worker_processes 1; pid %[1]s/pid; error_log %[1]s/error.log;
events { worker_connections 1024; }
http {
	access_log off; keepalive_requests 1000000000;
	client_body_temp_path %[1]s/a; proxy_temp_path %[1]s/b; fastcgi_temp_path %[1]s/c; uwsgi_temp_path %[1]s/d; scgi_temp_path %[1]s/e;
	set_real_ip_from 127.0.0.1; real_ip_header X-Forwarded-For;
	%[2]s
	server { listen %[3]s; location / { %[4]s } }
}
`, home, s.options, s.address, s.config)
	path := filepath.Join(home, "nginx.conf")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		return fmt.Errorf("writing nginx.conf: %w", err)
	}
	s.command = exec.CommandContext(context.Background(), program, "-p", home, "-c", path, "-e", filepath.Join(home, "error.log"))
	return nil
}

func (s *server) stop() { process.Stop(s.command) }

// usage is what a process has used up to now.
type usage struct {
	cpu         time.Duration // user and system
	rss         int64         // bytes, at this moment
	collections int           // of garbage
}

var collection = regexp.MustCompile(`(?m)^gc \d+ @`)

func (s *server) usage() (u usage, err error) {
	used, err := process.UsageOf(s.command)
	if err != nil {
		return u, fmt.Errorf("%s: %w", s.name, err)
	}
	text, err := os.ReadFile(s.log)
	if err != nil {
		return u, fmt.Errorf("%s: reading its log: %w", s.name, err)
	}
	return usage{used.CPU, used.RSS, len(collection.FindAllIndex(text, -1))}, nil
}
