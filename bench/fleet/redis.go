package main

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/edgelimit/caddy-edgelimit/bench/internal/process"
)

// redisServer is a real one, with a connection that only looks at it.
type redisServer struct {
	address netip.AddrPort
	command *exec.Cmd
	client  *redis.Client
	version string
}

func startRedis(address netip.AddrPort, directory string, cpu int) (*redisServer, error) {
	s := &redisServer{address: address}
	s.command = exec.CommandContext(context.Background(), "redis-server", "--port", strconv.Itoa(int(address.Port())), "--bind", address.Addr().String(),
		"--save", "", "--appendonly", "no", "--dir", directory)
	if _, err := process.Start(s.command, cpu); err != nil {
		return nil, fmt.Errorf("starting redis-server: %w", err)
	}
	if err := process.AwaitListening(address); err != nil {
		s.stop()
		return nil, fmt.Errorf("waiting for redis-server: %w", err)
	}
	s.client = redis.NewClient(&redis.Options{Addr: address.String(), ReadTimeout: time.Minute})
	info, err := s.info("server")
	if err != nil {
		s.stop()
		return nil, err
	}
	// a server of somebody else's may hold the port, and its keys are not ours to drop
	if info["process_id"] != strconv.Itoa(s.command.Process.Pid) {
		s.stop()
		return nil, fmt.Errorf("another server listens on %s", address)
	}
	s.version = info["redis_version"]
	return s, nil
}

func (s *redisServer) stop() {
	if s.client != nil {
		_ = s.client.Close()
	}
	process.Stop(s.command)
}

func (s *redisServer) empty() error {
	if err := s.client.FlushAll(context.Background()).Err(); err != nil {
		return fmt.Errorf("emptying Redis: %w", err)
	}
	return nil
}

// info reads a section of INFO.
func (s *redisServer) info(section string) (map[string]string, error) {
	text, err := s.client.Info(context.Background(), section).Result()
	if err != nil {
		return nil, fmt.Errorf("reading Redis's INFO %s: %w", section, err)
	}
	fields := make(map[string]string)
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			fields[name] = value
		}
	}
	return fields, nil
}

// redisUsage is what Redis has done up to now.
type redisUsage struct {
	calls  int           // of scripts
	script time.Duration // in them
	cpu    time.Duration // of the whole process
}

func (u redisUsage) since(before redisUsage) redisUsage {
	return redisUsage{u.calls - before.calls, u.script - before.script, u.cpu - before.cpu}
}

func (s *redisServer) usage() (u redisUsage, err error) {
	stats, err := s.info("commandstats")
	if err != nil {
		return u, err
	}
	for _, command := range []string{"eval", "evalsha", "eval_ro", "evalsha_ro"} {
		var calls, micros int
		if line, ok := stats["cmdstat_"+command]; ok {
			if _, err := fmt.Sscanf(line, "calls=%d,usec=%d,", &calls, &micros); err != nil {
				return u, fmt.Errorf("reading Redis's count of %s, %q: %w", command, line, err)
			}
		}
		u.calls += calls
		u.script += time.Duration(micros) * time.Microsecond
	}
	cpu, err := s.info("cpu")
	if err != nil {
		return u, err
	}
	for _, name := range []string{"used_cpu_user", "used_cpu_sys"} {
		seconds, err := strconv.ParseFloat(cpu[name], 64)
		if err != nil {
			return u, fmt.Errorf("reading Redis's CPU time: %w", err)
		}
		u.cpu += time.Duration(seconds * float64(time.Second))
	}
	return u, nil
}

// memory is what all data takes, in bytes.
func (s *redisServer) memory() (int, error) {
	info, err := s.info("memory")
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(info["used_memory"])
}
