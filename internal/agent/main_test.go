package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"testing"

	"google.golang.org/protobuf/proto"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/leak"
	"github.com/xcena-dev/maru/internal/rpc"
)

// Roles of the test binary, as a process of its own.
const (
	mapperEnv = "MARU_TEST_AGENT_MAPPER" // binds itself, holds, and waits to be killed
	agentEnv  = "MARU_TEST_AGENT_CONFIG" // an agent
)

func TestMain(m *testing.M) {
	if raw := os.Getenv(mapperEnv); raw != "" {
		mapper([]byte(raw))
	}
	if raw := os.Getenv(agentEnv); raw != "" {
		agentMain([]byte(raw))
	}
	leak.Check(m)
}

type mapperJob struct {
	Agent, RM  string
	Bind, Hold []byte // messages; no Hold: only bound
}

func mapper(raw []byte) {
	fail := func(err error) {
		fmt.Println("error", err)
		os.Exit(1)
	}
	var j mapperJob
	bind, hold := &maruv1.BindSessionRequest{}, &maruv1.HoldRequest{}
	if err := json.Unmarshal(raw, &j); err != nil {
		fail(err)
	}
	if err := proto.Unmarshal(j.Bind, bind); err != nil {
		fail(err)
	}
	if err := proto.Unmarshal(j.Hold, hold); err != nil {
		fail(err)
	}
	a, err := rpc.NewClient("unix:"+j.Agent, rpc.Retry{})
	if err != nil {
		fail(err)
	}
	bound, err := maruv1.NewNodeWatcherClient(a).BindSession(context.Background(), bind)
	if err != nil {
		fail(err)
	}
	if len(j.Hold) > 0 {
		m, err := rpc.NewClient(j.RM, rpc.Retry{})
		if err != nil {
			fail(err)
		}
		held, err := maruv1.NewResourceManagerClient(m).Hold(context.Background(), hold)
		if err != nil {
			fail(err)
		}
		if held.GetProvable() != bound.GetProvable() {
			fail(fmt.Errorf("bound provable %t (%s), held provable %t (%s)", bound.GetProvable(), bound.GetReason(), held.GetProvable(), held.GetReason()))
		}
	}
	fmt.Println("serving")
	select {}
}

func agentMain(raw []byte) {
	var cfg Config
	if err := json.Unmarshal(raw, &cfg); err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	cfg.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil))
	a, err := Start(context.Background(), cfg)
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	fmt.Println("serving")
	fmt.Fprintln(os.Stderr, <-a.Failed()) // until it is killed
	os.Exit(1)
}
